//! Colours: what the frames of a guest's RAM are used for. [`saved`] finds them when a VM is saved,
//! [`shown`] reports them.

pub mod saved;
pub mod shown;
