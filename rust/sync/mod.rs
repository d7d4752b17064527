//! Locks, atomics and threads: those of the standard library, or of a model checker.
//!
//! With the feature `shuttle`, what is used from here runs under a model checker of that name. It
//! tries many orders of threads, all on one thread, and fails where an order deadlocks or panics.
//! Only what is tested so takes its locks from here. A futex has a model of its own
//! (`host/futex.rs`). Under the model every test runs within `shuttle::check_random` or its
//! like; those tests are in modules named `model`, which `make shuttle` runs.
//!
//! What the model does not have: timeouts (a wait with one never times out), and orders that only
//! weakly ordered atomics show.
//!
//! Where `make tsan` compiles, locks tell the thread sanitizer what they order.

#[cfg(not(feature = "shuttle"))]
pub(crate) use std::{
    hint,
    sync::{Arc, PoisonError, atomic, mpsc},
    thread, thread_local,
};

#[cfg(not(any(feature = "shuttle", thread_sanitizer)))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

#[cfg(all(not(feature = "shuttle"), thread_sanitizer))]
mod sanitized;
#[cfg(all(not(feature = "shuttle"), thread_sanitizer))]
pub(crate) use sanitized::{Condvar, Mutex, MutexGuard};

#[cfg(feature = "shuttle")]
pub(crate) use shuttle::{
    hint,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, atomic, mpsc},
    thread, thread_local,
};
