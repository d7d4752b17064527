//! Waiting on a 32-bit word. Threads of one process only.

#[cfg(not(feature = "shuttle"))]
pub(super) use kernel::{wait, wake_all};
#[cfg(feature = "shuttle")]
pub(super) use model::{wait, wake_all};

#[cfg(not(feature = "shuttle"))]
mod kernel {
    use std::sync::atomic::AtomicU32;

    use rustix::thread::futex::{self, Flags};

    /// Sleeps while the word holds `expected`, or for a while less: the caller checks again.
    pub(in crate::host) fn wait(word: &AtomicU32, expected: u32) {
        // Every error (the word has changed, a signal came) means: look again.
        let _ = futex::wait(word, Flags::PRIVATE, expected, None);
    }

    /// Wakes every thread that sleeps on the word.
    pub(in crate::host) fn wake_all(word: &AtomicU32) {
        // Cannot fail for an aligned word of this process.
        let _ = futex::wake(word, Flags::PRIVATE, i32::MAX as u32);
    }
}

/// The kernel's futex for the model checker: a condition per word, and one lock under which a word
/// is compared and its waiters are woken, as the kernel does under the lock of a bucket.
#[cfg(feature = "shuttle")]
mod model {
    use std::collections::HashMap;

    use crate::sync::atomic::{AtomicU32, Ordering};
    use crate::sync::{Arc, Condvar, Mutex, PoisonError};

    shuttle::lazy_static! {
        static ref CONDITIONS: Mutex<HashMap<usize, Arc<Condvar>>> = Mutex::new(HashMap::new());
    }

    pub(in crate::host) fn wait(word: &AtomicU32, expected: u32) {
        let mut conditions = CONDITIONS.lock().unwrap_or_else(PoisonError::into_inner);
        if word.load(Ordering::SeqCst) == expected {
            let condition = Arc::clone(conditions.entry(key(word)).or_default());
            drop(condition.wait(conditions));
        }
    }

    pub(in crate::host) fn wake_all(word: &AtomicU32) {
        let conditions = CONDITIONS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(condition) = conditions.get(&key(word)) {
            condition.notify_all();
        }
    }

    fn key(word: &AtomicU32) -> usize {
        std::ptr::from_ref(word).addr()
    }
}
