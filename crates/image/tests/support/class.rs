//! The classes of frames that all oracles distinguish.

use dayfly_introspect::Colour;

/// The rough use of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    Free,
    Cache,
    User,
    Kernel,
}

/// The class of a colour; `None` for unknown frames.
pub fn class(colour: Colour) -> Option<Class> {
    match colour {
        Colour::Unknown => None,
        Colour::Free => Some(Class::Free),
        Colour::UserData => Some(Class::User),
        Colour::UserCode | Colour::PageCache => Some(Class::Cache),
        Colour::KernelCode | Colour::KernelData | Colour::PageTable | Colour::Slab => {
            Some(Class::Kernel)
        }
    }
}
