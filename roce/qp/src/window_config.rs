//! Limits of the window of bytes in flight.

/// Limits of a [`Window`](crate::Window), bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WindowConfig {
    /// Initial size.
    pub initial: usize,
    /// Smallest size.
    pub min: usize,
    /// Largest size: about what the peer's socket buffer holds.
    pub max: usize,
}

impl Default for WindowConfig {
    fn default() -> Self {
        Self {
            initial: 64 << 10,
            min: 16 << 10,
            max: 4 << 20,
        }
    }
}
