//! A step in the background: its thread, what its workers do with a chunk, and what callers can
//! learn of it.

use std::time::{Duration, Instant};

use super::{downloads::Downloads, segment::Segments, thread::caught};
use crate::{
    adam::{Hyper, Step, batch, tensor::AdamTensor},
    device::{Device, Lane},
    error::{Error, Result},
    host::pool::Pool,
    simd::isa::Isa,
    state::chunk::Chunk,
    stream::view::check_disjoint,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    tier::revocable::HostSlots,
};

/// One tensor of a step.
#[derive(Clone, Copy, Debug)]
pub struct Update {
    /// Which of the engine's tensors.
    pub index: usize,
    /// Its host side, with the gradient.
    pub tensor: AdamTensor,
    /// Where its new weight goes, in device memory.
    pub weight: u64,
    /// The number of this update, from 1.
    pub count: u64,
    /// What to step it with.
    pub hyper: Hyper,
}

/// What the last step took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timing {
    /// From the first chunk to the last.
    pub step: Duration,
    /// The part of it that the worker who waited longest has waited for gradients.
    pub gradients: Duration,
    /// Bytes that came down since the step before.
    pub bytes_downloaded: u64,
    /// Bytes that went up.
    pub bytes_uploaded: u64,
}

/// What the threads of an engine have in common.
pub(super) struct Shared {
    pub(super) device: Arc<dyn Device>,
    pub(super) pool: Pool,
    pub(super) isa: Isa,
    pub(super) segments: Segments,
    /// Where the state of each chunk is: at home, where uploads take the weights from.
    pub(super) slots: HostSlots,
    pub(super) downloads: Downloads,
    /// For each segment whose gradient was taken by itself since the last submit: that copy's
    /// ticket. 0 for the others.
    pub(super) taken: Box<[AtomicU64]>,
    /// The ticket of `gradients_event` at the last submit.
    pub(super) all_taken: AtomicU64,
    pub(super) bytes_downloaded: AtomicU64,
    pub(super) state: Mutex<State>,
    pub(super) changed: Condvar,
}

#[derive(Default)]
pub(super) struct State {
    /// Submitted and not yet begun.
    pub(super) job: Option<Vec<Update>>,
    /// From submit to the last chunk.
    pub(super) busy: bool,
    /// For each segment: its upload of the last step is enqueued and its event recorded, or it had
    /// no part in that step.
    pub(super) issued: Vec<bool>,
    pub(super) failure: Option<String>,
    pub(super) timing: Timing,
    pub(super) quit: bool,
}

impl State {
    pub(super) fn check_idle(&self) -> Result<()> {
        match &self.failure {
            Some(failure) => Err(broken(failure)),
            None if self.busy => {
                Err(Error::value("a step is still running, expected it to be finished first"))
            }
            None => Ok(()),
        }
    }
}

fn broken(failure: &str) -> Error {
    Error::os(
        "a step failed half-way, so parameters and state are not those of any step; hint: go on from a checkpoint",
        std::io::Error::other(failure),
    )
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether `waiting` ended within `timeout`.
    pub(super) fn wait_while(
        &self,
        timeout: Duration,
        mut waiting: impl FnMut(&State) -> bool,
    ) -> Result<bool> {
        let (state, _) = self
            .changed
            .wait_timeout_while(self.lock(), timeout, |state| {
                state.failure.is_none() && waiting(state)
            })
            .unwrap_or_else(PoisonError::into_inner);
        match &state.failure {
            Some(failure) => Err(broken(failure)),
            None => Ok(!waiting(&state)),
        }
    }

    pub(super) fn check_index(&self, index: usize) -> Result<()> {
        if index < self.segments.tensors() {
            return Ok(());
        }
        Err(Error::value(format!(
            "tensor `{index}`, expected one of the engine's {}",
            self.segments.tensors()
        )))
    }

    pub(super) fn check(&self, updates: &[Update]) -> Result<()> {
        let mut seen = vec![false; self.segments.tensors()];
        for Update { index, tensor, hyper, .. } in updates {
            self.check_index(*index)?;
            if std::mem::replace(&mut seen[*index], true) {
                return Err(Error::value(format!(
                    "tensor `{index}` stands twice in a step, expected each once"
                )));
            }
            if tensor.param.numel() != self.segments.numel(*index) {
                return Err(Error::value(format!(
                    "tensor `{index}` has `{}` elements, expected {}",
                    tensor.param.numel(),
                    self.segments.numel(*index)
                )));
            }
            hyper.validate()?;
        }
        let tensors: Vec<AdamTensor> = updates.iter().map(|update| update.tensor).collect();
        let counts: Vec<u64> = updates.iter().map(|update| update.count).collect();
        let grads = batch::grads_of(&tensors, &counts)?;
        check_disjoint(
            tensors.iter().flat_map(AdamTensor::written),
            grads.iter().map(|&grad| ("grad", grad)),
        )
    }

    /// The coordinator's life.
    pub(super) fn coordinate(&self) {
        loop {
            let idle = |state: &mut State| !state.quit && state.job.is_none();
            let mut state =
                self.changed.wait_while(self.lock(), idle).unwrap_or_else(PoisonError::into_inner);
            let Some(updates) = state.job.take() else { return };
            drop(state);
            let begin = Instant::now();
            let stepped = caught("a worker", || self.step(&updates));
            for taken in &self.taken {
                taken.store(0, Ordering::Relaxed);
            }
            let mut state = self.lock();
            match stepped {
                Ok((gradients, bytes_uploaded)) => {
                    let bytes_downloaded = self.bytes_downloaded.swap(0, Ordering::Relaxed);
                    state.timing = Timing {
                        step: begin.elapsed(),
                        gradients,
                        bytes_downloaded,
                        bytes_uploaded,
                    };
                }
                Err(error) => state.failure = Some(error.to_string()),
            }
            state.busy = false;
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Steps and uploads everything; returns how long a worker has waited for gradients, and the
    /// bytes that go up.
    fn step(&self, updates: &[Update]) -> Result<(Duration, u64)> {
        let Job { chunks, segments } = &Job::new(updates, &self.segments);
        let next = AtomicUsize::new(0);
        let failed = AtomicBool::new(false);
        let failure = Mutex::new(None);
        let longest_wait_ns = AtomicU64::new(0);
        let work = || -> Result<()> {
            self.device.attach()?;
            let mut waited = Duration::ZERO;
            while !failed.load(Ordering::Relaxed) {
                // In order, whoever comes: the next forward needs them in order.
                let Some(&(chunk, segment)) = chunks.get(next.fetch_add(1, Ordering::Relaxed))
                else {
                    break;
                };
                let segment = &segments[segment];
                let update = &updates[chunk.tensor];
                if !segment.is_ready.load(Ordering::Acquire) {
                    let begin = Instant::now();
                    self.wait_for_gradient(segment.number)?;
                    segment.is_ready.store(true, Ordering::Release);
                    waited += begin.elapsed();
                }
                let grad = update.tensor.grad.unwrap_or_else(|| unreachable!("checked by submit"));
                let state =
                    self.slots.route(&update.tensor, Chunk { tensor: update.index, ..chunk });
                // SAFETY: submit's caller vouches for the memory; no other worker has this chunk,
                // its gradient has arrived and nothing reads its last weight any more.
                unsafe { batch::step_chunk(self.isa, &state, grad, &segment.step, chunk) };
                // Release hands this chunk's writes to whoever takes the last one, which acquires
                // all of them.
                if segment.chunks_left.fetch_sub(1, Ordering::AcqRel) == 1 {
                    self.upload(update, segment.number)?;
                }
            }
            longest_wait_ns.fetch_max(waited.as_nanos() as u64, Ordering::Relaxed);
            Ok(())
        };
        self.pool.run_on_each_worker(&|_| {
            if let Err(error) = work() {
                failed.store(true, Ordering::Relaxed);
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        });
        let bytes = |update: &Update| {
            (update.tensor.weight().numel() * update.tensor.weight().dtype().size()) as u64
        };
        match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok((
                Duration::from_nanos(longest_wait_ns.into_inner()),
                updates.iter().map(bytes).sum(),
            )),
        }
    }

    fn wait_for_gradient(&self, segment: usize) -> Result<()> {
        let (ticket, event) = match self.taken[segment].load(Ordering::Acquire) {
            0 => (self.all_taken.load(Ordering::Acquire), self.segments.gradients_event()),
            ticket => (ticket, segment),
        };
        // Until then the event stands for an older copy.
        self.downloads.wait(ticket)?;
        self.device.wait(event)?;
        // Its upload of the step before: long done, unless nobody has waited for it.
        self.device.wait(self.segments.weight_event(segment))
    }

    fn upload(&self, update: &Update, segment: usize) -> Result<()> {
        let weight = update.tensor.weight();
        let elements = self.segments.elements(update.index, segment);
        let (offset, nbytes) =
            (elements.start * weight.dtype().size(), elements.len() * weight.dtype().size());
        let from = std::ptr::with_exposed_provenance_mut::<u8>(weight.address() + offset);
        // SAFETY: submit's caller vouches for both sides; the segment lies within them and its
        // chunks are stepped.
        unsafe { self.device.copy(Lane::Upload, update.weight + offset as u64, from, nbytes)? };
        self.device.record(Lane::Upload, self.segments.weight_event(segment))?;
        self.lock().issued[segment] = true;
        self.changed.notify_all();
        Ok(())
    }
}

/// A segment of the step that runs.
struct RunningSegment {
    number: usize,
    step: Step,
    chunks_left: AtomicUsize,
    /// Its gradient has arrived, and its last upload has ended.
    is_ready: AtomicBool,
}

/// All chunks of a step in order, each with its segment's place in `segments`.
struct Job {
    chunks: Vec<(Chunk, usize)>,
    segments: Vec<RunningSegment>,
}

impl Job {
    fn new(updates: &[Update], all: &Segments) -> Self {
        let mut job = Self { chunks: Vec::new(), segments: Vec::new() };
        for (tensor, update) in updates.iter().enumerate() {
            let step = Step::new(&update.hyper, update.count);
            for number in all.of(update.index) {
                let chunks = all.chunks(update.index, number);
                let place = job.segments.len();
                let (chunks_left, is_ready) =
                    (AtomicUsize::new(chunks.len()), AtomicBool::new(false));
                job.segments.push(RunningSegment { number, step, chunks_left, is_ready });
                job.chunks.extend(chunks.map(|index| (Chunk { tensor, index }, place)));
            }
        }
        job
    }
}
