//! Persistent worker threads, pinned to cores, that run a task over a range of indices.
//!
//! - POOL-1 `task(i)` is called exactly once for every `i`, and `run` returns after the last call
//!   has.
//! - POOL-2 A worker's first share of a job depends on the number of tasks and of workers only: the
//!   worker that first touched a page works on it again, except for what others steal when they
//!   have nothing left.
//! - POOL-3 `run` may be called from any number of threads (one job at a time; the others wait) and
//!   from a task (it then runs inline). Only a job whose tasks may block ([`Pool::run_blocking`])
//!   holds up no other for longer than [`PATIENCE`]: the other then gets workers of its own, on the
//!   same CPUs, which stay for the next time.
//! - POOL-4 A pool works in a forked child, on fresh workers; no job is in flight at the moment of
//!   a fork (see `host/fork.rs`).
//! - POOL-5 An idle pool uses no CPU; a dropped one has joined its workers, unless a [`Pool::part`]
//!   of it is left.
//!
//! The workers belong to the process: [`Pool::global`] has them, and [`Pool::background`] the same
//! number that let others go first. Whoever may use some of them takes a part.
//!
//! Cost of a job, measured on two cores of a virtual machine: 5 us while the workers still spin
//! from the last one (50 us), 15 to 30 us after that (the wake-up of a sleeping core).
//!
//! Which CPUs: see [`choose_cpus`]. The allowed set is the affinity mask of the thread that makes
//! the pool (or the one before an OpenMP runtime narrowed it, see [`remember_affinity`]). Where
//! several ranks share the host (`host/environment.rs`), each takes its share of it, near its GPU;
//! unless the mask is narrower than what the container allows: then a launcher has bound this
//! process, and its mask is its share. A pool is made before any GPU is opened, so which GPU a rank
//! has is taken from its local rank (`host/gpus.rs`).

mod crew;
#[cfg(all(test, feature = "shuttle"))]
mod model;
mod placement;
mod workers;

use std::collections::HashSet;
use std::io;
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::OnceLock;
use std::thread;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::host::environment::{Environment, RankShare, THREADS_VARIABLE, variable};
use crate::host::fork::{self, PerProcess};
use crate::host::topology::{Topology, format_cpu_list};
use crate::host::{claims, gpus};
use crate::sync::Arc;
use crate::sync::atomic::Ordering;
use crate::{Error, Result};
use crew::{Balance, run_inline};
use workers::Workers;

pub use placement::choose_cpus;
pub use workers::PATIENCE;

/// What a pool is made of. The default: one worker per allowed physical core, or as many as
/// `STEPWELL_THREADS` says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolConfig {
    /// Number of workers.
    pub threads: Option<usize>,
    /// The CPU of each worker, exactly.
    pub cpus: Option<Vec<usize>>,
}

/// How many of `threads` cores work while a process launches on a device: all but one. Where ranks
/// share a host, an eighth less: each has a thread that gathers and those of its collectives, and a
/// rank whose launches are late has all others wait. Measured with two ranks of 16 cores each: a
/// step takes 6 % less with 12 or 13 workers than with 15 (benches/README.md).
fn beside_launches(threads: usize, num_ranks: usize) -> usize {
    let launching = if num_ranks > 1 { 1 + threads / 8 } else { 1 };
    threads.saturating_sub(launching).max(1)
}

/// How many of `beside` workers step while a process launches all the time. They have all of a
/// model's step for it, and the launches take longer beside them. Measured on 16 cores: 12 take as
/// long as 15, and the model's step .87 to 1.0 of the time.
fn behind_launches(beside: usize) -> usize {
    (4 * beside).div_ceil(5)
}

/// What is added to the nice value of workers in the background: a thread of the program that comes
/// to a CPU of theirs gets nine tenths of it, until the kernel has moved it on.
const BACKGROUND_NICE: i32 = 10;

/// The first of some pinned workers, or all of them. See the [module](self).
#[derive(Clone, Debug)]
pub struct Pool {
    workers: Arc<Workers>,
    threads: usize,
}

impl Pool {
    /// Starts the workers.
    ///
    /// # Errors
    /// [`Error::Value`] for a bad count or list (see [`choose_cpus`]) or a `STEPWELL_THREADS`
    /// or a variable of a launcher that is not a count; [`Error::Os`] where threads cannot
    /// be started, or cannot be pinned to CPUs that were named.
    pub fn new(config: &PoolConfig) -> Result<Self> {
        let _entered = fork::enter();
        Self::build(config)
    }

    /// The pool of this process, made on first use as [`PoolConfig::default`] says. A forked child
    /// makes its own, from its own environment.
    ///
    /// # Errors
    /// As [`Pool::new`]; tried again on the next call.
    pub fn global() -> Result<&'static Self> {
        static GLOBAL: PerProcess<Pool> = PerProcess::new();
        Self::of_process(&GLOBAL, || Self::build(&PoolConfig::default()))
    }

    /// As many workers on the CPUs of [`Pool::global`], made on first use, for work in the
    /// background of the program: its threads go first where they come to a worker's CPU.
    ///
    /// # Errors
    /// As [`Pool::new`]; tried again on the next call.
    pub fn background() -> Result<&'static Self> {
        static BACKGROUND: PerProcess<Pool> = PerProcess::new();
        let global = &Self::global()?.workers;
        Self::of_process(&BACKGROUND, || {
            let (mut workers, _) = Workers::start(global.cpus.clone(), BACKGROUND_NICE)?;
            workers.num_ranks = global.num_ranks;
            workers.has_more_ranks_than_cores = global.has_more_ranks_than_cores;
            Ok(Self::all_of(workers))
        })
    }

    fn of_process(
        made: &PerProcess<Self>,
        build: impl FnOnce() -> Result<Self>,
    ) -> Result<&'static Self> {
        let _entered = fork::enter();
        made.get_or_make(|| Ok(Box::leak(Box::new(build()?))))
    }

    fn all_of(workers: Workers) -> Self {
        Self { threads: workers.cpus.len(), workers: Arc::new(workers) }
    }

    /// The first `threads` of its workers, or all where it has fewer. They are shared: their jobs
    /// take turns.
    ///
    /// # Errors
    /// [`Error::Value`] for none.
    pub fn part(&self, threads: usize) -> Result<Self> {
        if threads == 0 {
            return Err(Error::value(
                "invalid number of threads `0`, expected at least 1; hint: leave it out for one \
                 per physical core",
            ));
        }
        Ok(Self { workers: Arc::clone(&self.workers), threads: threads.min(self.threads) })
    }

    fn build(config: &PoolConfig) -> Result<Self> {
        fork::register()?;
        let topology = Topology::host();
        let now =
            allowed_cpus().map_err(|error| Error::os("cannot read the affinity mask", error))?;
        let (allowed, narrowed) =
            before_openmp(now, AT_LOAD.get(), |name| std::env::var_os(name).is_some());
        let environment = Environment::of_process()?;
        let config = completed(config, environment.threads);
        let share = environment.share.unwrap_or(RankShare::WHOLE);
        let mut gpu_nodes = gpu_nodes(&topology, share.num_ranks);
        let (is_whole, num_ranks) = (share == RankShare::WHOLE, share.num_ranks);
        let share = if !is_whole && is_bound(&allowed, &topology) {
            gpu_nodes = gpu_nodes.get(share.rank).copied().into_iter().collect();
            RankShare::WHOLE
        } else {
            share
        };
        let cpus = choose_cpus(&topology, &allowed, &config, share, &gpu_nodes)?;

        if let Some(warning) = narrowed {
            log::warn!(target: "stepwell", "{warning}");
        }
        let distinct = cpus.iter().collect::<HashSet<_>>().len();
        if distinct < cpus.len() {
            log::warn!(
                target: "stepwell",
                "`{}` workers share the `{distinct}` CPUs `{}`; hint: {THREADS_VARIABLE} and \
                 `threads` above the number of CPUs only cost time",
                cpus.len(),
                format_cpu_list(&cpus)
            );
        }
        let (mut workers, unpinned) = Workers::start(cpus, 0)?;
        workers.num_ranks = num_ranks;
        workers.has_more_ranks_than_cores = share.num_ranks > num_cores(&topology, &allowed);
        if let Some((cpu, error)) = unpinned {
            if config.cpus.is_some() {
                return Err(Error::os(format!("cannot pin a worker to CPU `{cpu}`"), error));
            }
            log::warn!(target: "stepwell", "{}", workers::unpinned_warning(cpu, &error));
        }
        Ok(Self::all_of(workers))
    }

    /// Number of workers.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// How many of its workers work where the threads of this process that launch on a device have
    /// cores of their own: all but one; where ranks share the host, an eighth less.
    pub fn threads_beside_launches(&self) -> usize {
        beside_launches(self.threads(), self.workers.num_ranks)
    }

    /// How many of its workers step in the background of all of a model's step: four fifths of
    /// [`threads_beside_launches`](Self::threads_beside_launches).
    pub fn threads_behind_launches(&self) -> usize {
        behind_launches(self.threads_beside_launches())
    }

    /// The CPU of each worker.
    pub fn cpus(&self) -> &[usize] {
        &self.workers.cpus[..self.threads]
    }

    /// Tells other processes that steps run on the CPUs of these workers, and warns, once in this
    /// process, where steps of another one run on them too. Called before steps; only the first
    /// call costs more than a look at a flag.
    pub fn claim_cpus(&self) {
        let Workers { num_claimed, has_more_ranks_than_cores, .. } = &*self.workers;
        if *has_more_ranks_than_cores
            || num_claimed.fetch_max(self.threads, Ordering::Relaxed) >= self.threads
        {
            return;
        }
        claims::claim_cpus(self.cpus());
    }

    /// Calls `task(i)` once for every `i` in `0..tasks`, on the workers, and returns when all are
    /// done.
    ///
    /// Each worker starts with a contiguous share, in order, and steals from the end of others'
    /// shares when its own is empty. A single task, and whatever is run from within a task, runs on
    /// the calling thread.
    ///
    /// A task must not wait for a lock that a thread may hold while it forks (such as Python's
    /// GIL), and must not itself fork but to `exec`.
    ///
    /// # Panics
    /// With the panic of a task, after all tasks have been called.
    pub fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        self.dispatch(tasks, Balance::Steal, false, task);
    }

    /// Calls `task(worker)` once for every worker in `0..threads()`, each on that worker: for what
    /// must happen on its CPU, such as touching memory first. From within a task it runs inline,
    /// all on the calling thread.
    ///
    /// # Panics
    /// As [`Pool::run`].
    pub fn run_on_each_worker(&self, task: &(dyn Fn(usize) + Sync)) {
        self.dispatch(self.threads(), Balance::Fixed, false, task);
    }

    /// As [`Pool::run_on_each_worker`], with tasks that may block: on a device, on a drive, on what
    /// the program does meanwhile.
    ///
    /// # Panics
    /// As [`Pool::run`].
    pub fn run_blocking(&self, task: &(dyn Fn(usize) + Sync)) {
        self.dispatch(self.threads(), Balance::Fixed, true, task);
    }

    fn dispatch(
        &self,
        tasks: usize,
        balance: Balance,
        may_block: bool,
        task: &(dyn Fn(usize) + Sync),
    ) {
        if tasks == 0 {
            return;
        }
        let entered = fork::enter();
        let (payload, warning) = if fork::in_task() || (tasks == 1 && balance == Balance::Steal) {
            (run_inline(tasks, task), None)
        } else {
            self.workers.run(self.threads, tasks, (balance, may_block), task)
        };
        drop(entered);
        if let Some(warning) = warning
            && !self.workers.has_warned.swap(true, Ordering::Relaxed)
        {
            log::warn!(target: "stepwell", "{warning}");
        }
        if let Some(payload) = payload {
            resume_unwind(payload);
        }
    }
}

/// What the environment says counts where the configuration says nothing.
fn completed(config: &PoolConfig, threads: Option<usize>) -> PoolConfig {
    let threads = config.threads.or(threads.filter(|_| config.cpus.is_none()));
    PoolConfig { threads, ..config.clone() }
}

/// The NUMA node of each rank's GPU; empty where one of them is not known.
fn gpu_nodes(topology: &Topology, num_ranks: usize) -> Vec<usize> {
    gpus::nodes_of_ranks(topology, Path::new("/"), variable, num_ranks)
}

/// What falls to one of several ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankPlace {
    /// The CPU of each of its workers.
    pub cpus: Vec<usize>,
    /// The PCI address of its GPU; `None` where it has none, or that is not known.
    pub gpu: Option<String>,
}

/// What would fall to each of `num_ranks` ranks of this host, with the CPUs that this process may
/// use.
///
/// # Errors
/// As [`choose_cpus`]; [`Error::Value`] for no ranks; [`Error::Os`] where the affinity mask cannot
/// be read.
pub fn places_of_ranks(num_ranks: usize) -> Result<Vec<RankPlace>> {
    if num_ranks == 0 {
        return Err(Error::value("invalid number of ranks `0`, expected at least 1"));
    }
    let topology = Topology::host();
    let allowed =
        allowed_cpus().map_err(|error| Error::os("cannot read the affinity mask", error))?;
    let gpus = gpus::of_ranks(Path::new("/"), variable, num_ranks).unwrap_or_default();
    let nodes = gpu_nodes(&topology, num_ranks);
    (0..num_ranks)
        .map(|rank| {
            let share = RankShare { rank, num_ranks };
            let cpus = choose_cpus(&topology, &allowed, &PoolConfig::default(), share, &nodes)?;
            Ok(RankPlace { cpus, gpu: gpus.get(rank).cloned() })
        })
        .collect()
}

/// The affinity mask of the calling thread.
fn allowed_cpus() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
}

/// The affinity mask when the library was loaded.
static AT_LOAD: OnceLock<Vec<usize>> = OnceLock::new();

/// Remembers the affinity mask. Called when the extension module is loaded, which is before it
/// imports torch.
pub fn remember_affinity() {
    if let Ok(mask) = allowed_cpus() {
        AT_LOAD.get_or_init(|| mask);
    }
}

/// OpenMP runtimes that are asked to bind their threads narrow the main thread to one CPU while
/// they are loaded (with torch). That mask is meant for their thread, not for this process: the one
/// before it counts, where it is known; else a warning says what happens.
fn before_openmp(
    now: Vec<usize>,
    at_load: Option<&Vec<usize>>,
    is_set: impl Fn(&str) -> bool,
) -> (Vec<usize>, Option<String>) {
    let binding = ["OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"]
        .into_iter()
        .find(|name| is_set(name));
    match (binding, at_load) {
        (Some(_), Some(at_load)) if now.len() == 1 && at_load.len() > 1 => (at_load.clone(), None),
        (Some(name), _) if now.len() == 1 => {
            let warning = format!(
                "{name} is set and this thread is bound to CPU `{}`, so the pool has one \
                 worker\nhint: import stepwell before torch, or unset {name}",
                format_cpu_list(&now)
            );
            (now, Some(warning))
        }
        _ => (now, None),
    }
}

fn num_cores(topology: &Topology, cpus: &[usize]) -> usize {
    cpus.iter().map(|&cpu| topology.cpu(cpu).core).collect::<HashSet<_>>().len()
}

/// Whether this process is bound to fewer CPUs than the container lets it use.
fn is_bound(allowed: &[usize], topology: &Topology) -> bool {
    // The kernel cuts a mask of all CPUs down to what the control groups allow, of either version
    // and however they are mounted. Asked on a thread of its own, whose mask then goes with it.
    let ask = || {
        let mut all = CpuSet::new();
        (0..CpuSet::MAX_CPU).for_each(|cpu| all.set(cpu));
        sched_setaffinity(None, &all)?;
        allowed_cpus()
    };
    let available = thread::scope(|scope| {
        thread::Builder::new().spawn_scoped(scope, ask).ok()?.join().ok()?.ok()
    });
    available.is_some_and(|available| is_narrower(allowed, &available, topology.isolated_cpus()))
}

/// Isolated CPUs are outside the default mask: they do not count.
fn is_narrower(allowed: &[usize], available: &[usize], isolated: &[usize]) -> bool {
    available.iter().any(|cpu| !allowed.contains(cpu) && !isolated.contains(cpu))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_leave_room_for_what_launches() {
        assert_eq!([1, 2, 16].map(|threads| beside_launches(threads, 1)), [1, 1, 15]);
        assert_eq!([1, 2, 4, 8, 16].map(|threads| beside_launches(threads, 2)), [1, 1, 3, 6, 13]);
        assert_eq!([1, 3, 7, 13, 15].map(behind_launches), [1, 3, 6, 11, 12]);
    }

    #[test]
    fn a_mask_that_openmp_narrowed_is_not_ours() {
        let bound = |name: &str| name == "OMP_PROC_BIND";
        let whole = vec![0, 1, 2];
        assert_eq!(before_openmp(vec![1], Some(&whole), bound), (whole.clone(), None));
        assert_eq!(
            before_openmp(vec![1], Some(&whole), |_| false),
            (vec![1], None),
            "a mask set from outside is respected"
        );
        assert_eq!(
            before_openmp(vec![1, 2], Some(&whole), bound),
            (vec![1, 2], None),
            "OpenMP narrows to one"
        );
        let (cpus, warning) = before_openmp(vec![1], Some(&vec![1]), bound);
        assert!(cpus == [1] && warning.is_some_and(|warning| warning.contains("OMP_PROC_BIND")));
    }

    #[test]
    fn an_argument_wins_over_the_environment() {
        let threads = |threads, cpus| completed(&PoolConfig { threads, cpus }, Some(3)).threads;
        assert_eq!(threads(None, None), Some(3));
        assert_eq!(threads(Some(2), None), Some(2));
        assert_eq!(threads(None, Some(vec![0])), None);
    }

    #[test]
    fn a_mask_that_was_set_is_narrower() {
        assert!(!is_narrower(&[0, 1, 2, 3], &[0, 1, 2, 3], &[]));
        assert!(is_narrower(&[0, 1], &[0, 1, 2, 3], &[]));
        assert!(!is_narrower(&[0, 1], &[0, 1, 2, 3], &[2, 3]));
        assert!(is_narrower(&[0, 1], &[0, 1, 2, 3], &[3]));
    }
}
