//! Memory that records are read into and written from: a fixed number of buffers of one size, each
//! large enough for the largest record.
//!
//! - BUF-1 A buffer has one owner: the caller, or a request in flight. It comes back to the set
//!   when its owner drops it, and never before the last I/O on it has ended.
//! - BUF-2 The memory is page-aligned, and is not there in a forked child: a fork while a drive
//!   writes to it copies nothing.

use std::{
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rustix::mm::Advice;

use crate::{
    Error, Result,
    host::{
        memory::{Buffer, BufferConfig},
        pool::Pool,
    },
};

/// All buffers of a volume.
pub(super) struct Buffers {
    memory: Buffer,
    each_nbytes: usize,
    num: usize,
    free: Mutex<Vec<u16>>,
    returned: Condvar,
}

impl Buffers {
    /// `num` buffers of `nbytes` each, rounded up to pages.
    pub(super) fn new(num: usize, nbytes: usize, pool: &Pool) -> Result<Arc<Self>> {
        if !(1..=usize::from(u16::MAX)).contains(&num) {
            return Err(Error::value(format!(
                "num_buffers is `{num}`, expected 1 to {}",
                u16::MAX
            )));
        }
        let each_nbytes = nbytes.next_multiple_of(rustix::param::page_size());
        let memory = Buffer::new(num * each_nbytes, &BufferConfig::default(), pool)?;
        // SAFETY: the range is the buffer's own whole pages; a child that reads them anyway faults.
        // Refused by kernels without it only, where a fork copies what is in flight.
        let _ = unsafe {
            rustix::mm::madvise(memory.as_ptr().cast(), num * each_nbytes, Advice::LinuxDontFork)
        };
        let free = Mutex::new((0..num as u16).rev().collect());
        Ok(Arc::new(Self { memory, each_nbytes, num, free, returned: Condvar::new() }))
    }

    /// Address and size of each.
    pub(super) fn all(&self) -> impl ExactSizeIterator<Item = (*mut u8, usize)> {
        (0..self.num).map(|index| (self.at(index), self.each_nbytes))
    }

    fn at(&self, index: usize) -> *mut u8 {
        // SAFETY: within the mapping, of `num` times `each_nbytes`.
        unsafe { self.memory.as_ptr().add(index * self.each_nbytes) }
    }

    fn free(&self) -> MutexGuard<'_, Vec<u16>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One that is free, at latest after `timeout`.
    pub(super) fn take(self: &Arc<Self>, timeout: Duration) -> Option<RecordBuffer> {
        let (mut free, _) = self
            .returned
            .wait_timeout_while(self.free(), timeout, |free| free.is_empty())
            .unwrap_or_else(PoisonError::into_inner);
        let index = free.pop()?;
        Some(RecordBuffer { buffers: Arc::clone(self), index })
    }
}

/// Memory for a record, of a volume's own. Dropping it gives it back to the volume.
pub struct RecordBuffer {
    buffers: Arc<Buffers>,
    index: u16,
}

impl RecordBuffer {
    /// The first byte, aligned to a page.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.buffers.at(usize::from(self.index))
    }

    /// Bytes of room: at least those of the volume's largest record.
    #[must_use]
    pub fn nbytes(&self) -> usize {
        self.buffers.each_nbytes
    }

    /// All of it.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the memory is this value's alone (BUF-1), mapped and initialised by `Buffer`.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.nbytes()) }
    }

    /// All of it.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`; `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.nbytes()) }
    }

    pub(super) fn index(&self) -> u16 {
        self.index
    }

    pub(super) fn is_of(&self, buffers: &Arc<Buffers>) -> bool {
        Arc::ptr_eq(&self.buffers, buffers)
    }
}

impl fmt::Debug for RecordBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RecordBuffer({}, {} bytes)", self.index, self.nbytes())
    }
}

impl Drop for RecordBuffer {
    fn drop(&mut self) {
        self.buffers.free().push(self.index);
        self.buffers.returned.notify_one();
    }
}
