//! What the long benchmarks have in common: images, a machine of their own, guests in it, and programs that run there.

pub mod guests;
pub mod images;
pub mod place;
pub mod scripts;
