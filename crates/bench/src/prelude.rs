//! What nearly every scenario uses.

pub use crate::counts::at_least;
pub use crate::figures::Shape::{Digits, Mib, Ms, Plain, Seconds, Us};
pub use crate::figures::{
    C_FLOOR, Column, Curve, Phases, Plot, Report, SPREAD, Spread, Table, Unit,
};
pub use crate::figures::{float, load, mean, median, ms, percent, ratio, rounded, shown};
pub use crate::places::Places;
pub use anyhow::{Context, Result, anyhow, bail, ensure};
pub use dayfly_units::{Bytes, Name, PAGE_SIZE, VmId};
pub use serde::{Deserialize, Serialize};
pub use serde_json::{Value, json};
pub use std::path::{Path, PathBuf};
pub use std::time::{Duration, Instant};
