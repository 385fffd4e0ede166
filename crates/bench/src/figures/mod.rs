//! Figures that every scenario shares: samples, tables, plots, and the report that is written.

mod phases;
mod plot;
mod report;
mod samples;
mod table;

pub use phases::Phases;
pub use plot::{Curve, Plot};
pub use report::{C_FLOOR, Report, load};
pub use samples::{Spread, Unit, float, geometric_mean, mean, median, ms, percent, ratio, rounded};
pub use table::{Column, SPREAD, Shape, Table, shown};
