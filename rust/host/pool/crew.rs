//! The worker threads of one pool in one process, and the job they share.
//!
//! A job is published by opening a gate. Workers enter it, take tasks, and leave when there are
//! none; the one that finds every share empty closes the gate, and the last to leave wakes the
//! caller. So the caller waits for the tasks and for the workers that took part, but not for a
//! worker whose CPU is busy with something else: the others have taken its tasks.
//!
//! Invariants:
//! - CREW-1 Every index is taken by exactly one worker: shares are disjoint, and a take is one
//!   compare-and-swap on its share.
//! - CREW-2 The job is read only by workers inside the gate; it is replaced only when the gate is
//!   closed and empty.
//! - CREW-3 Shares only shrink while the gate is open. In a total order of takes (they are
//!   sequentially consistent) the last one is followed by its worker's look at all shares, which
//!   finds them empty: the gate is closed at the end of every job.

use std::any::Any;
use std::io;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getcpu, sched_setaffinity};

use crate::host::{fork, futex};
use crate::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Arc, Mutex, PoisonError, hint, mpsc};
use crate::{Error, Result};

/// Set while a job may be entered; the bits below count the workers inside.
const OPEN: u32 = 1 << 31;

/// How long an idle worker looks for the next job before it sleeps: the calls of one step follow
/// each other within this time.
const WORKER_SPIN: Duration = Duration::from_micros(50);
/// How often an idle worker looks between two readings of the clock. The model has no clock.
const LOOKS_PER_READING: usize = if cfg!(feature = "shuttle") { 1 } else { 32 };

/// How a job's tasks move between workers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Balance {
    /// A worker whose share is empty takes from the end of the others'.
    Steal,
    /// Every task stays with the worker whose share it is in.
    Fixed,
}

/// What a panicking task left.
pub(super) type Payload = Box<dyn Any + Send>;

/// The workers. Dropping joins them.
pub(super) struct Crew {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    generation: u32,
}

/// On cache lines of its own (two: processors fetch them in pairs).
#[repr(align(128))]
struct Line<T>(T);

struct Shared {
    /// Counts jobs; idle workers sleep on it.
    epoch: Line<AtomicU32>,
    /// `OPEN` and the number of workers inside; the caller sleeps on it.
    gate: Line<AtomicU32>,
    /// Workers that sleep or are about to.
    sleepers: AtomicU32,
    quit: AtomicBool,
    job: AtomicPtr<Job<'static>>,
    /// How many workers, the first ones, the latest job is for.
    threads: AtomicUsize,
    /// Per worker the tasks not yet taken, see [`pack`].
    shares: Box<[Line<AtomicU64>]>,
    panic: Mutex<Option<Payload>>,
    spin: Duration,
    /// The CPU that the caller of the latest job was on: the worker there gets out of its way.
    caller_cpu: AtomicUsize,
}

struct Job<'a> {
    task: &'a (dyn Fn(usize) + Sync),
    /// Index of the first task of this round.
    base: usize,
    balance: Balance,
}

/// Begin in the low half, end in the high half.
fn pack(begin: u32, end: u32) -> u64 {
    u64::from(begin) | u64::from(end) << 32
}

fn unpack(share: u64) -> (u32, u32) {
    (share as u32, (share >> 32) as u32)
}

impl Crew {
    /// Starts one worker per entry of `cpus` and waits until each has been pinned. The second part
    /// holds the first failure to pin, after which that worker runs unpinned.
    pub(super) fn start(cpus: &[usize], nice: i32) -> Result<(Self, Option<(usize, io::Error)>)> {
        let shares_cpu = cpus.iter().enumerate().any(|(i, cpu)| cpus[..i].contains(cpu));
        let shared = Arc::new(Shared {
            epoch: Line(AtomicU32::new(0)),
            gate: Line(AtomicU32::new(0)),
            sleepers: AtomicU32::new(0),
            quit: AtomicBool::new(false),
            job: AtomicPtr::default(),
            threads: AtomicUsize::new(0),
            shares: cpus.iter().map(|_| Line(AtomicU64::new(0))).collect(),
            panic: Mutex::new(None),
            // A worker that spins on a CPU where another has work only delays it.
            spin: if shares_cpu || cfg!(feature = "shuttle") {
                Duration::ZERO
            } else {
                WORKER_SPIN
            },
            caller_cpu: AtomicUsize::new(usize::MAX),
        });
        let mut crew = Self {
            shared,
            workers: Vec::with_capacity(cpus.len()),
            generation: fork::generation(),
        };
        let (report, reports) = mpsc::channel();
        for (worker, &cpu) in cpus.iter().enumerate() {
            let (shared, report) = (Arc::clone(&crew.shared), report.clone());
            let handle = thread::Builder::new()
                .name(format!("stepwell-{worker}"))
                .spawn(move || {
                    // Only fails when the crew is given up already.
                    let _ = report.send((cpu, pin(cpu)));
                    drop(report);
                    if nice != 0 {
                        // Of this thread alone, on Linux. Where it is refused, work is only slower.
                        let _ = rustix::process::nice(nice);
                    }
                    let _scope = fork::TaskScope::new();
                    shared.work(worker, cpu);
                })
                .map_err(|error| {
                    let threads = cpus.len();
                    Error::os(
                        format!(
                            "cannot start worker `{worker}` of `{threads}`; hint: see `ulimit -u`"
                        ),
                        error,
                    )
                })?;
            crew.workers.push(handle);
        }
        drop(report);
        let unpinned = reports.iter().filter_map(|(cpu, result)| Some((cpu, result.err()?))).last();
        Ok((crew, unpinned))
    }

    /// The fork generation of the process that these threads exist in.
    pub(super) fn generation(&self) -> u32 {
        self.generation
    }

    /// Runs `task(i)` for every `i` in `0..tasks`, on the first `threads` workers, and returns what
    /// the first panicking one left.
    pub(super) fn run(
        &mut self,
        threads: usize,
        tasks: usize,
        balance: Balance,
        task: &(dyn Fn(usize) + Sync),
    ) -> Option<Payload> {
        self.run_in_rounds(threads, tasks, u32::MAX, balance, task)
    }

    /// A share counts in 32 bits, so what is larger goes round by round.
    fn run_in_rounds(
        &mut self,
        threads: usize,
        tasks: usize,
        round_tasks_max: u32,
        balance: Balance,
        task: &(dyn Fn(usize) + Sync),
    ) -> Option<Payload> {
        for base in (0..tasks).step_by(round_tasks_max as usize) {
            let round_tasks = (tasks - base).min(round_tasks_max as usize) as u32;
            self.shared.run_round(threads, round_tasks, &Job { task, base, balance });
        }
        self.shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        let workers = mem::take(&mut self.workers);
        if self.generation != fork::generation() {
            // A forked child: the threads are not here, so there is nothing to join, and to detach
            // them would be an error.
            mem::forget(workers);
            return;
        }
        self.shared.quit.store(true, Ordering::Release);
        self.shared.announce();
        for worker in workers {
            // Tasks' panics are caught; should a worker have died otherwise there is nothing left
            // to do for it.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Publishes a job and waits until it is done. Called by one thread at a time (`Crew::run`
    /// takes `&mut self`).
    fn run_round(&self, threads: usize, tasks: u32, job: &Job<'_>) {
        let num_shares = threads as u64;
        let edge = |worker: u64| (worker.min(num_shares) * u64::from(tasks) / num_shares) as u32;
        for (worker, share) in (0..).zip(&self.shares) {
            share.0.store(pack(edge(worker), edge(worker + 1)), Ordering::Relaxed);
        }
        self.threads.store(threads, Ordering::Relaxed);
        self.job.store(std::ptr::from_ref(job).cast_mut().cast(), Ordering::Relaxed);
        self.caller_cpu.store(sched_getcpu(), Ordering::Relaxed);
        self.gate.0.store(OPEN, Ordering::Release);
        self.announce();
        // Not spinning: one of the workers is usually pinned to this very CPU and begins when the
        // caller sleeps.
        loop {
            let gate = self.gate.0.load(Ordering::Acquire);
            if gate == 0 {
                return;
            }
            futex::wait(&self.gate.0, gate);
        }
    }

    /// Wakes every idle worker.
    fn announce(&self) {
        // Either the worker counts itself before this load, or it sees the new epoch before it
        // sleeps: both are sequentially consistent.
        self.epoch.0.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            futex::wake_all(&self.epoch.0);
        }
    }

    /// A worker's life.
    fn work(&self, worker: usize, cpu: usize) {
        let mut epoch = 0;
        loop {
            epoch = self.wait_for_next(epoch, worker, cpu);
            if self.quit.load(Ordering::Acquire) {
                return;
            }
            if self.is_for(worker) && self.enter() {
                // SAFETY: the gate was open when this worker entered, and `run_round`, which owns
                // the job on its stack, returns only when the gate is closed and every worker has
                // left (CREW-2). The acquire in `enter` makes the store before the gate's opening
                // visible.
                let job = unsafe { &*self.job.load(Ordering::Relaxed) };
                self.take_part(worker, job);
                self.leave();
            }
        }
    }

    /// Whether the latest job is for this worker. A job whose tasks are each one worker's does not
    /// end without it, so none that waits for this worker is missed.
    fn is_for(&self, worker: usize) -> bool {
        worker < self.threads.load(Ordering::Relaxed)
    }

    /// Spins, then sleeps, until the epoch is another. Where the caller wants to go on, or threads
    /// have been left a core of their own, spinning would keep them from doing so.
    fn wait_for_next(&self, epoch: u32, worker: usize, cpu: usize) -> u32 {
        let is_in_the_way = self.caller_cpu.load(Ordering::Relaxed) == cpu || !self.is_for(worker);
        let spin = if is_in_the_way { Duration::ZERO } else { self.spin };
        let begin = Instant::now();
        loop {
            for _ in 0..LOOKS_PER_READING {
                let now = self.epoch.0.load(Ordering::Acquire);
                if now != epoch {
                    return now;
                }
                hint::spin_loop();
            }
            if begin.elapsed() >= spin {
                break;
            }
        }
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let now = loop {
            let now = self.epoch.0.load(Ordering::SeqCst);
            if now != epoch {
                break now;
            }
            futex::wait(&self.epoch.0, epoch);
        };
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
        now
    }

    fn enter(&self) -> bool {
        self.gate
            .0
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, |gate| {
                (gate & OPEN != 0).then_some(gate + 1)
            })
            .is_ok()
    }

    fn leave(&self) {
        if self.shares.iter().all(|share| {
            let (begin, end) = unpack(share.0.load(Ordering::SeqCst));
            begin == end
        }) {
            self.gate.0.fetch_and(!OPEN, Ordering::AcqRel);
        }
        // Release hands this worker's writes to the caller, through the counts of the workers that
        // leave later.
        if self.gate.0.fetch_sub(1, Ordering::AcqRel) == 1 {
            futex::wake_all(&self.gate.0);
        }
    }

    fn take_part(&self, worker: usize, job: &Job<'_>) {
        while let Some(index) = self.take_first(worker) {
            self.perform(job, index);
        }
        if job.balance == Balance::Steal {
            let threads = self.threads.load(Ordering::Relaxed);
            for victim in (1..threads).map(|distance| (worker + distance) % threads) {
                while let Some(index) = self.take_last(victim) {
                    self.perform(job, index);
                }
            }
        }
    }

    fn take_first(&self, share: usize) -> Option<u32> {
        let take = |(begin, end)| (begin < end).then(|| pack(begin + 1, end));
        self.take(share, take).map(|(begin, _)| begin)
    }

    fn take_last(&self, share: usize) -> Option<u32> {
        let take = |(begin, end)| (begin < end).then(|| pack(begin, end - 1));
        self.take(share, take).map(|(_, end)| end - 1)
    }

    /// Returns the share as it was before.
    fn take(&self, share: usize, take: impl Fn((u32, u32)) -> Option<u64>) -> Option<(u32, u32)> {
        let taken =
            self.shares[share]
                .0
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |share| take(unpack(share)));
        taken.ok().map(unpack)
    }

    fn perform(&self, job: &Job<'_>, index: u32) {
        if let Err(payload) =
            catch_unwind(AssertUnwindSafe(|| (job.task)(job.base + index as usize)))
        {
            keep_first(&mut self.panic.lock().unwrap_or_else(PoisonError::into_inner), payload);
        }
    }
}

/// Runs every task on the calling thread, in order, with the same treatment of panics.
pub(super) fn run_inline(tasks: usize, task: &(dyn Fn(usize) + Sync)) -> Option<Payload> {
    let _scope = fork::TaskScope::new();
    let mut first = None;
    for index in 0..tasks {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| task(index))) {
            keep_first(&mut first, payload);
        }
    }
    first
}

fn keep_first(first: &mut Option<Payload>, payload: Payload) {
    if first.is_none() {
        *first = Some(payload);
    } else {
        // Its destructor is the task's code and may panic too.
        mem::forget(payload);
    }
}

fn pin(cpu: usize) -> io::Result<()> {
    if cfg!(feature = "shuttle") {
        // The model's threads are one thread.
        return Ok(());
    }
    if cpu >= CpuSet::MAX_CPU {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_cover_every_index_once() {
        let (mut crew, _) = Crew::start(&[0, 0, 0], 0).expect("three workers");
        let counts: Vec<AtomicU32> = (0..100).map(|_| AtomicU32::new(0)).collect();
        for round_tasks_max in [1, 7, 99, 100, 101] {
            let payload = crew.run_in_rounds(3, 100, round_tasks_max, Balance::Steal, &|i| {
                counts[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(payload.is_none());
        }
        assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 5));
    }
}
