//! Waiting on a 32-bit word. Threads of one process only.

use std::sync::atomic::AtomicU32;

use rustix::thread::futex::{self, Flags};

/// Sleeps while the word holds `expected`, or for a while less: the caller checks again.
pub(super) fn wait(word: &AtomicU32, expected: u32) {
    // Every error (the word has changed, a signal came) means: look again.
    let _ = futex::wait(word, Flags::PRIVATE, expected, None);
}

/// Wakes every thread that sleeps on the word.
pub(super) fn wake_all(word: &AtomicU32) {
    // Cannot fail for an aligned word of this process.
    let _ = futex::wake(word, Flags::PRIVATE, i32::MAX as u32);
}
