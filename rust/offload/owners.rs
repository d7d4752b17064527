//! What a caller lends: the objects that keep the memory of a call alive.
//!
//! The engine holds them until it uses that memory no more. It never drops them by itself: they may
//! be another language's objects, which only its own threads may drop. They are gathered, and the
//! caller drops them ([`Engine::returned`](super::Engine::returned)).

use std::any::Any;

/// What keeps the memory of one call alive.
pub type Owners = Box<dyn Any + Send>;

/// What keeps the memory of gradients alive that are taken.
pub struct Lent {
    /// On the device.
    pub sources: Owners,
    /// On the host.
    pub targets: Owners,
}
