//! Rust sources: tokens, modules, and which file imports which.

pub mod arrows;
pub mod attributes;
pub mod lex;
pub mod modules;
pub mod names;
pub mod paths;
pub mod targets;
