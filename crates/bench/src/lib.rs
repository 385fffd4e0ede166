//! What the benchmarks of other rooms share with `dayfly-bench`: drawing.

pub mod plot;
