//! io_uring: one ring and one thread for each queue.
//!
//! The thread moves operations from the queue to the ring, and sleeps in the kernel until
//! one of them has ended or the queue's event says that there are more.
//!
//! - URG-1 The queue's own file is registered, and so are buffers where `RLIMIT_MEMLOCK` allows
//!   it: each ring counts all of them against it.
//! - URG-2 The thread leaves only when nothing is in flight. If the ring fails, what is in flight
//!   fails, and its buffers are never used again: the kernel may still write to them.

use std::{io, os::fd::AsRawFd, sync::Arc};

use io_uring::{IoUring, opcode, squeue, types};
use rustix::io::Errno;

use super::queue::{Kind, Operation, Queue, Target};

/// What io_uring cannot do here.
pub(super) struct Shortcomings {
    /// Why buffers are not registered.
    pub(super) buffers: Option<io::Error>,
}

/// The file is the only one that is registered.
const FILE: types::Fixed = types::Fixed(0);

/// What the completion of the poll of the queue's event has as its user data.
const WAKE: u64 = u64::MAX;

/// A ring and what is in flight on it.
pub(super) struct Ring {
    ring: IoUring,
    /// Operations in flight. Completions name the place here.
    in_flight: Vec<Option<Operation>>,
    /// The places that are free.
    free: Vec<u32>,
    are_buffers_registered: bool,
    /// Whether a poll of the queue's event is in flight.
    is_polled: bool,
    event: i32,
    /// The queue's own file, open as long as the ring.
    own: Option<Arc<Target>>,
}

impl Ring {
    /// A ring for `depth` operations in flight. It is the calling thread's.
    pub(super) fn new(
        queue: &Queue,
        own: Option<Arc<Target>>,
        buffers: &[(usize, usize)],
        depth: usize,
    ) -> io::Result<(Self, Shortcomings)> {
        let entries = (depth as u32 + 1).next_power_of_two();
        let newest = || {
            let mut builder = IoUring::builder();
            builder.dontfork().setup_clamp().setup_single_issuer().setup_defer_taskrun();
            builder.build(entries)
        };
        // Kernels before 6.1 do not know the flags.
        let ring = newest().or_else(|error| match error.raw_os_error() {
            Some(libc::EINVAL) => IoUring::builder().dontfork().setup_clamp().build(entries),
            _ => Err(error),
        })?;
        if let Some(own) = &own {
            ring.submitter().register_files(&[own.file.as_raw_fd()])?;
        }
        let memory: Vec<libc::iovec> = buffers
            .iter()
            .map(|&(begin, nbytes)| libc::iovec {
                iov_base: std::ptr::with_exposed_provenance_mut(begin),
                iov_len: nbytes,
            })
            .collect();
        let registered = match &memory[..] {
            [] => Ok(()),
            // SAFETY: the buffers are mapped as long as the operations that name them are in
            // flight, since those own them; the kernel holds the pages itself.
            memory => unsafe { ring.submitter().register_buffers(memory) },
        };
        let ring = Self {
            in_flight: (0..depth).map(|_| None).collect(),
            free: (0..depth as u32).rev().collect(),
            are_buffers_registered: registered.is_ok(),
            is_polled: false,
            event: queue.event.as_raw_fd(),
            own,
            ring,
        };
        Ok((ring, Shortcomings { buffers: registered.err() }))
    }

    fn num_in_flight(&self) -> usize {
        self.in_flight.len() - self.free.len()
    }

    fn entry(&self, operation: &Operation) -> squeue::Entry {
        let Operation { kind, offset, memory, nbytes, buffer, .. } = *operation;
        let nbytes = nbytes as u32;
        // A file is one type where it is registered, and another one where it is not.
        macro_rules! entry_on {
            ($file:expr) => {
                match (kind, buffer.filter(|_| self.are_buffers_registered)) {
                    (Kind::Sync, _) => {
                        opcode::Fsync::new($file).flags(types::FsyncFlags::DATASYNC).build()
                    }
                    (Kind::Read, Some(buffer)) => {
                        opcode::ReadFixed::new($file, memory, nbytes, buffer).offset(offset).build()
                    }
                    (Kind::Read, None) => {
                        opcode::Read::new($file, memory, nbytes).offset(offset).build()
                    }
                    (Kind::Write, Some(buffer)) => {
                        opcode::WriteFixed::new($file, memory, nbytes, buffer)
                            .offset(offset)
                            .build()
                    }
                    (Kind::Write, None) => {
                        opcode::Write::new($file, memory, nbytes).offset(offset).build()
                    }
                }
            };
        }
        match &operation.target {
            None => entry_on!(FILE),
            Some(target) => entry_on!(types::Fd(target.file.as_raw_fd())),
        }
    }

    /// Puts it in the submission queue, which has an entry for each place and for the poll.
    fn put(&mut self, operation: Operation) {
        let place = self.free.pop().expect("no more are taken than places are free");
        let entry = self.entry(&operation).user_data(u64::from(place));
        self.in_flight[place as usize] = Some(operation);
        self.push(&entry);
    }

    fn poll_event(&mut self) {
        if !std::mem::replace(&mut self.is_polled, true) {
            let poll = opcode::PollAdd::new(types::Fd(self.event), libc::POLLIN as u32);
            self.push(&poll.build().user_data(WAKE));
        }
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: what the entry names lives until its completion: the operation is in
        // `in_flight`, which is emptied by completions only, and its request owns the buffer; the
        // event is the queue's, which outlives the thread's loop.
        let pushed = unsafe { self.ring.submission().push(entry) };
        debug_assert!(pushed.is_ok(), "an entry for each place");
    }

    /// Hands what was put to the kernel and waits for a completion.
    fn submit(&mut self) -> io::Result<()> {
        match self.ring.submit_and_wait(1) {
            Ok(_) => Ok(()),
            // A signal; or the kernel is short of memory or of room for completions: those that
            // there are are taken, and the rest is submitted the next time.
            Err(error)
                if matches!(
                    error.raw_os_error().map(Errno::from_raw_os_error),
                    Some(Errno::INTR | Errno::AGAIN | Errno::BUSY)
                ) =>
            {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Takes all completions; what is not done yet is put again.
    fn complete(&mut self) {
        loop {
            let completion = self.ring.completion().next();
            let Some(completion) = completion else { return };
            if completion.user_data() == WAKE {
                self.is_polled = false;
                // Read to be silent until the next wake.
                let mut count = [0; 8];
                // SAFETY: 8 bytes of this thread; the descriptor is the queue's, which is open.
                unsafe { libc::read(self.event, count.as_mut_ptr().cast(), count.len()) };
                continue;
            }
            let place = completion.user_data() as u32;
            let Some(operation) = self.in_flight[place as usize].take() else { continue };
            self.free.push(place);
            let returned = match completion.result() {
                negative @ ..0 => Err(io::Error::from_raw_os_error(-negative)),
                nbytes => Ok(nbytes as usize),
            };
            if let Some(rest) = operation.returned(returned, self.own.as_deref()) {
                self.put(rest);
            }
        }
    }

    /// What is in flight is given up.
    fn abandon(&mut self, error: &io::Error) {
        for operation in self.in_flight.iter_mut().filter_map(Option::take) {
            operation.request.abandon(operation.failure(copy_of(error)));
        }
    }
}

fn copy_of(error: &io::Error) -> io::Error {
    error
        .raw_os_error()
        .map_or_else(|| io::Error::other(error.to_string()), io::Error::from_raw_os_error)
}

/// The thread's loop, until the queue is closed and empty.
pub(super) fn run(mut ring: Ring, queue: &Queue) {
    let mut taken = Vec::with_capacity(ring.free.len());
    loop {
        let is_closed = queue.take(ring.free.len(), |operation| taken.push(operation));
        taken.drain(..).for_each(|operation| ring.put(operation));
        if is_closed && ring.num_in_flight() == 0 {
            return;
        }
        ring.poll_event();
        if let Err(error) = ring.submit() {
            ring.abandon(&error);
            refuse_all(queue, &error);
            return;
        }
        ring.complete();
    }
}

/// Every operation fails from now on, until the queue is closed.
fn refuse_all(queue: &Queue, error: &io::Error) {
    while let Some(operation) = queue.wait() {
        let failure = operation.failure(copy_of(error));
        operation.request.end_operation(Some(failure));
    }
}
