//! A relay between clients and a program that stands where the guest would be.

#![expect(clippy::unwrap_used, reason = "in a test it is how a failure shows")]

mod common;
mod jail;
mod tcp;
mod udp;
