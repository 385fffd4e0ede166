//! What the frames of a guest's RAM mean: found out when it is saved ([`saved`]), told to whoever asks ([`shown`]).

pub mod saved;
pub mod shown;
