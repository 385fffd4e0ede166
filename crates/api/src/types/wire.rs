//! The derives that all types of the API share.

/// Derives them for `item`.
macro_rules! wire {
    ($($item:item)*) => { $(
        #[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        #[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
        $item
    )* };
}

pub(super) use wire;
