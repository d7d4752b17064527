//! The standard library's locks, which tell the thread sanitizer what they order.
//!
//! The sanitizer sees the atomics of code that was compiled for it. The standard library was not:
//! where a lock is contended, and where a condition has been waited for, it takes the lock out of
//! its sight. What one thread wrote before it gave the lock back, and another reads after that,
//! looks like a race. So each lock says when it was taken and when it is given back, and nothing
//! else: two accesses that no lock orders are reported as before.
//!
//! The tests' own locks are these as well (`tests/on_device/`).

use std::{
    ops::{Deref, DerefMut},
    sync::{self, LockResult, PoisonError, WaitTimeoutResult},
    time::Duration,
};

unsafe extern "C" {
    // Of the sanitizer's run-time library. They take the address for a name.
    fn __tsan_acquire(address: *mut u8);
    fn __tsan_release(address: *mut u8);
}

/// As [`sync::Mutex`].
#[derive(Debug, Default)]
pub(crate) struct Mutex<T> {
    inner: sync::Mutex<T>,
}

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self { inner: sync::Mutex::new(value) }
    }

    pub(crate) fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        map(self.inner.lock(), |inner| MutexGuard::new(self, inner))
    }

    pub(crate) fn get_mut(&mut self) -> LockResult<&mut T> {
        self.inner.get_mut()
    }

    pub(crate) fn into_inner(self) -> LockResult<T> {
        self.inner.into_inner()
    }

    fn name(&self) -> *mut u8 {
        std::ptr::from_ref(self).cast_mut().cast()
    }

    fn is_taken(&self) {
        // SAFETY: the address is only compared, and this thread has the lock.
        unsafe { __tsan_acquire(self.name()) }
    }

    fn is_given_back(&self) {
        // SAFETY: as above; the lock is given back after this.
        unsafe { __tsan_release(self.name()) }
    }
}

/// As [`sync::MutexGuard`].
#[derive(Debug)]
pub(crate) struct MutexGuard<'a, T> {
    mutex: &'a Mutex<T>,
    // None while a condition is waited for, which gives it back itself.
    inner: Option<sync::MutexGuard<'a, T>>,
}

impl<'a, T> MutexGuard<'a, T> {
    fn new(mutex: &'a Mutex<T>, inner: sync::MutexGuard<'a, T>) -> Self {
        mutex.is_taken();
        Self { mutex, inner: Some(inner) }
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.inner.as_ref().expect("held")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.inner.as_mut().expect("held")
    }
}

impl<T> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        if self.inner.is_some() {
            self.mutex.is_given_back();
        }
    }
}

/// As [`sync::Condvar`].
#[derive(Debug, Default)]
pub(crate) struct Condvar {
    inner: sync::Condvar,
}

impl Condvar {
    pub(crate) const fn new() -> Self {
        Self { inner: sync::Condvar::new() }
    }

    pub(crate) fn notify_all(&self) {
        self.inner.notify_all();
    }

    pub(crate) fn wait<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
    ) -> LockResult<MutexGuard<'a, T>> {
        let mutex = guard.mutex;
        mutex.is_given_back();
        let inner = guard.inner.take().expect("held");
        map(self.inner.wait(inner), |inner| MutexGuard::new(mutex, inner))
    }

    pub(crate) fn wait_while<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        mut condition: impl FnMut(&mut T) -> bool,
    ) -> LockResult<MutexGuard<'a, T>> {
        while condition(&mut guard) {
            guard = self.wait(guard)?;
        }
        Ok(guard)
    }

    pub(crate) fn wait_timeout_while<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        timeout: Duration,
        mut condition: impl FnMut(&mut T) -> bool,
    ) -> LockResult<(MutexGuard<'a, T>, WaitTimeoutResult)> {
        let mutex = guard.mutex;
        mutex.is_given_back();
        let inner = guard.inner.take().expect("held");
        // The lock is taken before each look at the condition, and given back after it.
        let look = |value: &mut T| {
            mutex.is_taken();
            let is_waiting = condition(value);
            mutex.is_given_back();
            is_waiting
        };
        map(self.inner.wait_timeout_while(inner, timeout, look), |(inner, result)| {
            (MutexGuard::new(mutex, inner), result)
        })
    }
}

fn map<T, U>(result: LockResult<T>, change: impl FnOnce(T) -> U) -> LockResult<U> {
    match result {
        Ok(value) => Ok(change(value)),
        Err(error) => Err(PoisonError::new(change(error.into_inner()))),
    }
}
