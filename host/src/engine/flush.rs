//! Emptying tiers of the cache on demand.

/// Tiers to empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlushTiers {
    /// Device pages.
    pub device: bool,
    /// Host pages.
    pub host: bool,
    /// All that the attached storage backends hold.
    pub storage: bool,
}

impl Default for FlushTiers {
    /// Device and host: storage outlives a flush unless it is asked for.
    fn default() -> Self {
        Self {
            device: true,
            host: true,
            storage: false,
        }
    }
}

/// What a flush came to. Pages that requests hold stay.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FlushReport {
    /// Tiers that were emptied, as far as nothing held their pages.
    pub emptied: Vec<String>,
    /// Tiers that were not asked for, or could not be emptied.
    pub kept: Vec<String>,
    /// Device pages that stayed because they are in use.
    pub device_pages_kept: usize,
    /// Host pages that stayed because they are in use.
    pub host_pages_kept: usize,
}
