//! The host as a device: two lanes that copy memory, each in the order of its queue, on threads of
//! the process.
//!
//! Copies are as late as on a GPU, and [`HostDevice::pause`] makes them as late as a test wants.

use std::{
    collections::VecDeque,
    sync::atomic::{AtomicU64, Ordering},
};

use super::{
    Behind, CHECKSUM_RUN, CHECKSUM_SUMS, Channels, Device, Lane, Mark, Piece, Stream, mixed,
};
use crate::{
    adam::{
        Step,
        selected::{self, ChannelState},
    },
    error::Result,
    host::executor::{Executor, Role, Task},
    simd::isa::Isa,
    stream::{element::Dtype, view::View},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

/// See the [module](self).
pub struct HostDevice {
    lanes: [Arc<LaneQueue>; 2],
    executor: &'static Executor,
    /// For each event the copies that must have ended, times two, plus the number of their lane.
    events: Box<[AtomicU64]>,
}

impl HostDevice {
    /// Two empty lanes.
    ///
    /// # Errors
    /// [`Error::Os`] where the threads of the process cannot be started.
    ///
    /// [`Error::Os`]: crate::error::Error::Os
    pub fn new(events: usize) -> Result<Self> {
        let lane = || Arc::new(LaneQueue::new(events));
        Ok(Self {
            lanes: [lane(), lane()],
            executor: Executor::of_process(Role::Lanes)?,
            events: (0..events).map(|_| AtomicU64::new(0)).collect(),
        })
    }

    /// Holds back the copies of `lane`, or lets them go on.
    pub fn pause(&self, lane: Lane, paused: bool) {
        let lane = self.lane(lane);
        lane.lock().paused = paused;
        self.executor.wake(&lane.task());
    }

    fn enqueue(&self, lane: Lane, work: LaneWork) {
        let lane = self.lane(lane);
        let mut state = lane.lock();
        state.queue.push_back(work);
        state.enqueued += 1;
        drop(state);
        self.executor.wake(&lane.task());
    }

    fn lane(&self, lane: Lane) -> &Arc<LaneQueue> {
        &self.lanes[lane as usize]
    }
}

impl Drop for HostDevice {
    /// Copies what is queued first.
    fn drop(&mut self) {
        for lane in [Lane::Download, Lane::Upload] {
            self.pause(lane, false);
            self.executor.join(&self.lane(lane).task());
        }
    }
}

// SAFETY: one thread at a time copies in the order of a lane's queue, and counts a copy when it has
// ended; an event is done when that count is reached.
unsafe impl Device for HostDevice {
    fn attach(&self) -> Result<()> {
        Ok(())
    }

    fn detach(&self) {}

    unsafe fn copy(&self, lane: Lane, device: u64, host: *mut u8, nbytes: usize) -> Result<()> {
        let (device, host) = (device as usize, host.expose_provenance());
        let (from, to) = if lane == Lane::Download { (device, host) } else { (host, device) };
        self.enqueue(lane, LaneWork::Copy { from, to, nbytes });
        Ok(())
    }

    fn record(&self, lane: Lane, event: usize) -> Result<()> {
        let enqueued = self.lane(lane).lock().enqueued;
        self.events[event].store(enqueued * 2 + lane as u64, Ordering::Release);
        Ok(())
    }

    fn wait(&self, event: usize) -> Result<()> {
        let recorded = self.events[event].load(Ordering::Acquire);
        self.lanes[(recorded % 2) as usize].wait_for(recorded / 2);
        Ok(())
    }

    fn mark(&self, _stream: Stream) -> Result<Mark> {
        // The stream is the calling thread: what it holds is done.
        Ok(Mark(0))
    }

    fn order_lane_after(&self, _lane: Lane, _mark: Mark) -> Result<()> {
        Ok(())
    }

    fn order_stream_after(&self, _stream: Stream, event: usize) -> Result<()> {
        self.wait(event)
    }

    fn drain(&self) -> Result<()> {
        for lane in &self.lanes {
            let enqueued = lane.lock().enqueued;
            lane.wait_for(enqueued);
        }
        Ok(())
    }

    fn prepare_channels(&self) -> Result<()> {
        Isa::detect().map(|_| ())
    }

    unsafe fn step_channels(
        &self,
        _stream: Stream,
        blocks: &[(Channels, u64)],
        step: &Step,
    ) -> Result<()> {
        for (channels, grad) in blocks {
            let Opened { isa, state, indices, weight } = Opened::new(channels)?;
            let grad = View::new(*grad as usize, weight.dtype(), weight.numel())?;
            // The stream is the calling thread: what it holds is done.
            // SAFETY: the caller vouches for the memory.
            unsafe {
                let indices = indices_in(&indices);
                let of = (&channels.shape, indices.as_slice());
                if channels.follows_weight {
                    selected::follow_weights(isa, of, channels.kind, state.master, weight);
                }
                selected::step(isa, step, of, channels.kind, grad, &state, weight);
            }
        }
        Ok(())
    }

    unsafe fn restore_weights(&self, channels: &Channels) -> Result<()> {
        Opened::new(channels)?;
        self.enqueue(Lane::Upload, LaneWork::Restore(*channels));
        Ok(())
    }

    fn prepare_checksums(&self) -> Result<()> {
        Ok(())
    }

    unsafe fn checksums(&self, behind: Behind, memory: &[Piece], sums: u64) -> Result<()> {
        match behind {
            // The stream is the calling thread: what it holds is done.
            // SAFETY: passed on from the caller.
            Behind::Stream(_) => unsafe { write_checksums(memory, sums) },
            Behind::Uploads => {
                let each = (size_of::<u64>() * CHECKSUM_SUMS) as u64;
                for (&piece, at) in memory.iter().zip(0..) {
                    let sums = sums + at * each;
                    self.enqueue(Lane::Upload, LaneWork::Checksum { piece, sums });
                }
            }
        }
        Ok(())
    }

    unsafe fn pin(&self, _address: usize, _nbytes: usize) -> Result<()> {
        Ok(())
    }

    fn unpin(&self, _address: usize) {}
}

/// # Safety
/// As [`Device::checksums`].
unsafe fn write_checksums(memory: &[Piece], sums: u64) {
    let sums: *mut [u64; CHECKSUM_SUMS] = std::ptr::with_exposed_provenance_mut(sums as usize);
    // SAFETY: the caller vouches that it is alive, aligned, and not used otherwise.
    let sums = unsafe { std::slice::from_raw_parts_mut(sums, memory.len()) };
    for (piece, sums) in memory.iter().zip(sums) {
        let begin: *const u8 = std::ptr::with_exposed_provenance(piece.address as usize);
        let bytes: &[u8] = match piece.nbytes as usize {
            // Nothing may be there.
            0 => &[],
            // SAFETY: the caller vouches that it is alive, and not written.
            nbytes => unsafe { std::slice::from_raw_parts(begin, nbytes) },
        };
        *sums = checksum(bytes, piece.address as usize % WORD_BYTES);
    }
}

const WORD_BYTES: usize = size_of::<u64>();

/// The checksum of bytes of which the first is at place `lead` of its word
/// ([`Device::checksums`]).
fn checksum(bytes: &[u8], lead: usize) -> [u64; CHECKSUM_SUMS] {
    let mut sums = [0u64; CHECKSUM_SUMS];
    let mut add = |at: usize, word: [u8; WORD_BYTES]| {
        let sum = &mut sums[at / CHECKSUM_RUN % CHECKSUM_SUMS];
        *sum = sum.wrapping_add(mixed(u64::from_le_bytes(word), at as u64));
    };
    // A word of which only some bytes are there, from `begin` on.
    let part = |begin: usize, bytes: &[u8]| {
        let mut word = [0; WORD_BYTES];
        word[begin..begin + bytes.len()].copy_from_slice(bytes);
        word
    };
    let (first, rest) = bytes.split_at(((WORD_BYTES - lead) % WORD_BYTES).min(bytes.len()));
    if !first.is_empty() {
        add(0, part(lead, first));
    }
    let begin = usize::from(lead > 0);
    let (words, last) = rest.as_chunks::<WORD_BYTES>();
    words.iter().enumerate().for_each(|(at, &word)| add(begin + at, word));
    if !last.is_empty() {
        add(begin + words.len(), part(0, last));
    }
    sums
}

/// Channels as views of this machine's memory.
struct Opened {
    isa: Isa,
    state: ChannelState,
    indices: View,
    weight: View,
}

impl Opened {
    fn new(channels: &Channels) -> Result<Self> {
        let Channels { shape, kind, weight, state, .. } = channels;
        let memory = View::new(*state as usize, Dtype::Uint8, shape.nbytes())?;
        let (state, indices) = ChannelState::within(memory, shape);
        let weight = View::new(*weight as usize, kind.dtype(), shape.block_len())?;
        Ok(Self { isa: Isa::detect()?, state, indices, weight })
    }
}

/// # Safety
/// As [`View::slice`].
unsafe fn indices_in(view: &View) -> Vec<u32> {
    // SAFETY: passed on from the caller.
    unsafe { view.slice::<u32>(0..view.numel()) }.to_vec()
}

/// What a lane does.
enum LaneWork {
    Copy { from: usize, to: usize, nbytes: usize },
    Restore(Channels),
    Checksum { piece: Piece, sums: u64 },
}

impl LaneWork {
    /// # Safety
    /// As [`Device::copy`], [`Device::restore_weights`] or [`Device::checksums`] of what it is.
    unsafe fn run(self) {
        match self {
            Self::Copy { from, to, nbytes } => {
                let from = std::ptr::with_exposed_provenance::<u8>(from);
                let to = std::ptr::with_exposed_provenance_mut::<u8>(to);
                // SAFETY: passed on from the caller.
                unsafe { std::ptr::copy_nonoverlapping(from, to, nbytes) };
            }
            // SAFETY: passed on from the caller.
            Self::Checksum { piece, sums } => unsafe { write_checksums(&[piece], sums) },
            Self::Restore(channels) => {
                // It was opened before it was enqueued.
                let Ok(Opened { isa, state, indices, weight }) = Opened::new(&channels) else {
                    return;
                };
                // SAFETY: passed on from the caller.
                unsafe {
                    let indices = indices_in(&indices);
                    let of = (&channels.shape, indices.as_slice());
                    selected::write_weights(isa, of, channels.kind, state.master, weight);
                }
            }
        }
    }
}

#[derive(Default)]
struct LaneState {
    queue: VecDeque<LaneWork>,
    enqueued: u64,
    done: u64,
    paused: bool,
}

struct LaneQueue {
    state: Mutex<LaneState>,
    changed: Condvar,
}

impl LaneQueue {
    /// With room for so much; more makes room.
    fn new(room: usize) -> Self {
        let state = LaneState { queue: VecDeque::with_capacity(room), ..LaneState::default() };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, LaneState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_for(&self, count: u64) {
        let waiting = |state: &mut LaneState| state.done < count;
        drop(self.changed.wait_while(self.lock(), waiting).unwrap_or_else(PoisonError::into_inner));
    }

    fn next(&self) -> Option<LaneWork> {
        let mut state = self.lock();
        if state.paused { None } else { state.queue.pop_front() }
    }

    fn task(self: &Arc<Self>) -> Arc<dyn Task> {
        Arc::clone(self) as Arc<dyn Task>
    }
}

impl Task for LaneQueue {
    fn run(&self) {
        while let Some(work) = self.next() {
            // SAFETY: the caller that enqueued it vouches for the memory until it is done.
            unsafe { work.run() };
            self.lock().done += 1;
            self.changed.notify_all();
        }
    }
}
