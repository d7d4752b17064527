//! The host as a device: two threads that copy memory, each in the order of its queue.
//!
//! Copies are as late as on a GPU, and [`HostDevice::pause`] makes them as late as a test wants.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
};

use super::{Device, Lane, Mark, Stream};
use crate::error::{Error, Result};

/// See the [module](self).
pub struct HostDevice {
    lanes: [LaneThread; 2],
    /// For each event the copies that must have ended, times two, plus the number of their lane.
    events: Box<[AtomicU64]>,
}

impl HostDevice {
    /// Starts both lanes.
    ///
    /// # Errors
    /// [`Error::Os`] where threads cannot be started.
    pub fn new(events: usize) -> Result<Self> {
        Ok(Self {
            lanes: [
                LaneThread::start("stepwell-download", events)?,
                LaneThread::start("stepwell-upload", events)?,
            ],
            events: (0..events).map(|_| AtomicU64::new(0)).collect(),
        })
    }

    /// Holds back the copies of `lane`, or lets them go on.
    pub fn pause(&self, lane: Lane, paused: bool) {
        let lane = &self.lane(lane).shared;
        lane.lock().paused = paused;
        lane.changed.notify_all();
    }

    fn lane(&self, lane: Lane) -> &LaneThread {
        &self.lanes[lane as usize]
    }
}

// SAFETY: a lane's thread copies in the order of its queue and counts a copy when it has ended; an
// event is done when that count is reached.
unsafe impl Device for HostDevice {
    fn attach(&self) -> Result<()> {
        Ok(())
    }

    fn detach(&self) {}

    unsafe fn copy(&self, lane: Lane, device: u64, host: *mut u8, nbytes: usize) -> Result<()> {
        let (device, host) = (device as usize, host.expose_provenance());
        let (from, to) = if lane == Lane::Download { (device, host) } else { (host, device) };
        let lane = &self.lane(lane).shared;
        let mut state = lane.lock();
        state.queue.push_back(Copy { from, to, nbytes });
        state.enqueued += 1;
        lane.changed.notify_all();
        Ok(())
    }

    fn record(&self, lane: Lane, event: usize) -> Result<()> {
        let enqueued = self.lane(lane).shared.lock().enqueued;
        self.events[event].store(enqueued * 2 + lane as u64, Ordering::Release);
        Ok(())
    }

    fn wait(&self, event: usize) -> Result<()> {
        let recorded = self.events[event].load(Ordering::Acquire);
        self.lanes[(recorded % 2) as usize].shared.wait_for(recorded / 2);
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
            let enqueued = lane.shared.lock().enqueued;
            lane.shared.wait_for(enqueued);
        }
        Ok(())
    }

    unsafe fn pin(&self, _address: usize, _nbytes: usize) -> Result<()> {
        Ok(())
    }

    fn unpin(&self, _address: usize) {}
}

struct Copy {
    from: usize,
    to: usize,
    nbytes: usize,
}

#[derive(Default)]
struct LaneState {
    queue: VecDeque<Copy>,
    enqueued: u64,
    done: u64,
    paused: bool,
    quit: bool,
}

struct LaneShared {
    state: Mutex<LaneState>,
    changed: Condvar,
}

impl LaneShared {
    fn lock(&self) -> MutexGuard<'_, LaneState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_for(&self, count: u64) {
        let waiting = |state: &mut LaneState| state.done < count;
        drop(self.changed.wait_while(self.lock(), waiting).unwrap_or_else(PoisonError::into_inner));
    }

    fn work(&self) {
        loop {
            let idle =
                |state: &mut LaneState| !state.quit && (state.paused || state.queue.is_empty());
            let mut state =
                self.changed.wait_while(self.lock(), idle).unwrap_or_else(PoisonError::into_inner);
            let Some(Copy { from, to, nbytes }) = state.queue.pop_front() else { return };
            drop(state);
            let from = std::ptr::with_exposed_provenance::<u8>(from);
            let to = std::ptr::with_exposed_provenance_mut::<u8>(to);
            // SAFETY: `copy`'s caller vouches for both ranges until the copy is done.
            unsafe { std::ptr::copy_nonoverlapping(from, to, nbytes) };
            self.lock().done += 1;
            self.changed.notify_all();
        }
    }
}

struct LaneThread {
    shared: Arc<LaneShared>,
    thread: Option<JoinHandle<()>>,
}

impl LaneThread {
    /// With room for so many copies; more make room.
    fn start(name: &str, copies: usize) -> Result<Self> {
        let state = LaneState { queue: VecDeque::with_capacity(copies), ..LaneState::default() };
        let shared = Arc::new(LaneShared { state: Mutex::new(state), changed: Condvar::new() });
        let lane = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || lane.work())
            .map_err(|error| {
                Error::os(format!("cannot start the thread `{name}`; hint: see `ulimit -u`"), error)
            })?;
        Ok(Self { shared, thread: Some(thread) })
    }
}

impl Drop for LaneThread {
    fn drop(&mut self) {
        self.shared.lock().quit = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // It copies what is queued first. Its body does not panic.
            let _ = thread.join();
        }
    }
}
