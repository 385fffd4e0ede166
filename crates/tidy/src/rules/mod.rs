//! The rules. Each takes the tree and returns its findings.

pub mod circles;
pub mod columns;
pub mod crates;
pub mod files;
pub mod folders;
pub mod functions;
pub mod pages;
pub mod safety;
pub mod words;
