//! The pool: every index once, stealing, panics, concurrent and nested callers, fork, pinning,
//! joining. Every test has a time limit.

mod forked;

use std::any::Any;
use std::cell::Cell;
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use forked::{TIME_LIMIT, in_forked_child};
use proptest::prelude::*;
use rustix::thread::{CpuSet, gettid, sched_getaffinity, sched_setaffinity};
use stepwell::Error;
use stepwell::host::pool::{Pool, PoolConfig};

/// Runs a body on a thread of its own and fails when it takes too long: a hang must be a failure.
/// One body at a time: a thread that begins or ends holds a lock of the standard library, and a
/// child that is forked meanwhile starts no thread any more. That is a test's doing, not a pool's.
fn within_time_limit(body: impl FnOnce() + Send + 'static) {
    static ALONE: Mutex<()> = Mutex::new(());
    let (done, wait) = mpsc::channel();
    thread::spawn(move || {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        done.send(catch_unwind(AssertUnwindSafe(body)))
    });
    match wait.recv_timeout(TIME_LIMIT).expect("hangs: time limit passed") {
        Ok(()) => {}
        Err(payload) => std::panic::resume_unwind(payload),
    }
}

/// Looks again and again until it holds.
fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < TIME_LIMIT, "never came: {what}");
        thread::yield_now();
    }
}

fn pool(threads: usize) -> Pool {
    Pool::new(&PoolConfig { threads: Some(threads), ..PoolConfig::default() }).expect("pool")
}

fn counters(len: usize) -> Vec<AtomicU32> {
    (0..len).map(|_| AtomicU32::new(0)).collect()
}

/// Whether a job over the counters raises each by one.
fn runs_each_once(pool: &Pool, counters: &[AtomicU32]) -> bool {
    let before: Vec<u32> = counters.iter().map(|counter| counter.load(Ordering::Relaxed)).collect();
    pool.run(counters.len(), &|i| {
        counters[i].fetch_add(1, Ordering::Relaxed);
    });
    counters
        .iter()
        .zip(before)
        .all(|(counter, before)| counter.load(Ordering::Relaxed) == before + 1)
}

fn allowed_cpus() -> Vec<usize> {
    let set = sched_getaffinity(None).expect("mask");
    (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect()
}

fn message(payload: &(dyn Any + Send)) -> &str {
    payload
        .downcast_ref::<&str>()
        .copied()
        .or(payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("?")
}

#[test]
fn every_index_exactly_once() {
    within_time_limit(|| {
        let config =
            ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() };
        let all_jobs = prop::collection::vec(0_usize..300, 1..20);
        proptest!(config, |(threads in 1_usize..9, jobs in all_jobs, slow in 0_usize..300)| {
            let pool = pool(threads);
            for tasks in jobs {
                let counters = counters(tasks);
                pool.run(tasks, &|i| {
                    if i == slow {
                        thread::yield_now();
                    }
                    counters[i].fetch_add(1, Ordering::Relaxed);
                });
                prop_assert!(counters.iter().all(|counter| counter.load(Ordering::Relaxed) == 1));
            }
        });
    });
}

#[test]
fn short_jobs_back_to_back() {
    within_time_limit(|| {
        for threads in [2, 3, 8] {
            let pool = pool(threads);
            let counters = counters(threads);
            for _ in 0..5_000 {
                assert!(runs_each_once(&pool, &counters));
            }
        }
    });
}

#[test]
fn results_of_tasks_are_visible_to_the_caller() {
    within_time_limit(|| {
        let pool = pool(4);
        let mut data = vec![0_u64; 4096];
        for round in 1..200 {
            let begin = SharedPtr(data.as_mut_ptr());
            // SAFETY: every index is written by one task, and the caller reads after `run` has
            // returned.
            pool.run(data.len(), &|i| unsafe { begin.at(i).write(round * i as u64) });
            assert!(data.iter().enumerate().all(|(i, &value)| value == round * i as u64));
        }
    });
}

struct SharedPtr(*mut u64);
// SAFETY: used for disjoint elements only.
unsafe impl Sync for SharedPtr {}
impl SharedPtr {
    fn at(&self, i: usize) -> *mut u64 {
        self.0.wrapping_add(i)
    }
}

#[test]
fn a_worker_begins_with_its_own_share() {
    within_time_limit(|| {
        for threads in [2, 5] {
            let pool = pool(threads);
            let barrier = Barrier::new(threads);
            // All tasks meet, so each worker can have taken one only: its own.
            pool.run(threads, &|i| {
                barrier.wait();
                assert_eq!(thread::current().name(), Some(format!("stepwell-{i}").as_str()));
            });
        }
    });
}

#[test]
fn each_worker_runs_its_own() {
    within_time_limit(|| {
        for threads in [1, 2, 7] {
            let pool = pool(threads);
            for _ in 0..2_000 {
                let counters = counters(threads);
                pool.run_on_each_worker(&|worker| {
                    assert_eq!(
                        thread::current().name(),
                        Some(format!("stepwell-{worker}").as_str())
                    );
                    counters[worker].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counters.iter().all(|counter| counter.load(Ordering::Relaxed) == 1));
            }
        }
    });
}

#[test]
fn others_take_over_a_share_that_is_stuck() {
    within_time_limit(|| {
        let tasks = 40;
        let pool = pool(4);
        let done = AtomicUsize::new(0);
        pool.run(tasks, &|i| {
            if i == 0 {
                wait_until("the rest of the stuck worker's share", || {
                    done.load(Ordering::Relaxed) == tasks - 1
                });
            }
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.into_inner(), tasks);
    });
}

#[test]
fn a_panic_reaches_the_caller_after_all_tasks() {
    within_time_limit(|| {
        let pool = pool(3);
        // One task runs on the caller, several on the workers.
        for tasks in [1, 2, 50] {
            let counters = counters(tasks);
            let payload = catch_unwind(AssertUnwindSafe(|| {
                pool.run(tasks, &|i| {
                    counters[i].fetch_add(1, Ordering::Relaxed);
                    if i % 7 == 0 {
                        panic!("task {} failed", i % 7);
                    }
                });
            }))
            .expect_err("the panic is carried over");
            assert_eq!(message(&*payload), "task 0 failed");
            assert!(
                counters.iter().all(|counter| counter.load(Ordering::Relaxed) == 1),
                "no task is left out"
            );
            assert!(
                runs_each_once(&pool, &counters),
                "the pool goes on, and the panic is not reported twice"
            );
        }
    });
}

#[test]
fn concurrent_callers_take_turns() {
    within_time_limit(|| {
        let pool = pool(3);
        let jobs_in_flight = Mutex::new(HashSet::new());
        thread::scope(|scope| {
            for caller in 0..6 {
                let (pool, jobs_in_flight) = (&pool, &jobs_in_flight);
                scope.spawn(move || {
                    for _ in 0..300 {
                        let counters = counters(11);
                        let begun = AtomicUsize::new(0);
                        let ended = AtomicUsize::new(0);
                        pool.run(counters.len(), &|i| {
                            if begun.fetch_add(1, Ordering::SeqCst) == 0 {
                                let mut jobs = jobs_in_flight.lock().expect("lock");
                                assert!(jobs.is_empty(), "two jobs at a time");
                                jobs.insert(caller);
                            }
                            counters[i].fetch_add(1, Ordering::Relaxed);
                            if ended.fetch_add(1, Ordering::SeqCst) == 10 {
                                jobs_in_flight.lock().expect("lock").remove(&caller);
                            }
                        });
                        assert!(
                            counters.iter().all(|counter| counter.load(Ordering::Relaxed) == 1)
                        );
                    }
                });
            }
        });
    });
}

#[test]
fn a_task_may_run_jobs() {
    within_time_limit(|| {
        let (outer, other) = (pool(3), pool(2));
        let count = AtomicUsize::new(0);
        outer.run(6, &|_| {
            for pool in [&outer, &other] {
                pool.run(5, &|_| {
                    pool.run(2, &|_| {
                        count.fetch_add(1, Ordering::Relaxed);
                    });
                });
                pool.run_on_each_worker(&|_| {
                    count.fetch_add(1, Ordering::Relaxed);
                });
            }
        });
        assert_eq!(count.into_inner(), 6 * (2 * 5 * 2 + 3 + 2));
    });
}

#[test]
fn a_fork_while_jobs_run_sees_none_half_done() {
    within_time_limit(|| {
        let (pool, other) = (pool(3), pool(2));
        let sums = counters(64);
        let stop = AtomicBool::new(false);
        // A thread of this test that begins or ends holds a lock of Rust's runtime, for which a
        // child would wait. So all begin before the first fork, and end after the last.
        let (all_begun, all_forked) = (Barrier::new(6), Barrier::new(2));
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    all_begun.wait();
                    while !stop.load(Ordering::Relaxed) {
                        pool.run(sums.len(), &|i| {
                            sums[i].fetch_add(1, Ordering::Relaxed);
                        });
                    }
                });
            }
            scope.spawn(|| {
                all_begun.wait();
                while !stop.load(Ordering::Relaxed) {
                    Pool::global().expect("pool");
                }
            });
            // Makes and drops pools meanwhile: no lock of those is left behind either.
            scope.spawn(|| {
                all_begun.wait();
                while !stop.load(Ordering::Relaxed) {
                    drop(
                        Pool::new(&PoolConfig { threads: Some(2), ..PoolConfig::default() })
                            .expect("pool"),
                    );
                }
            });
            let result = catch_unwind(AssertUnwindSafe(|| {
                thread::scope(|forks| {
                    // Two threads fork at the same time.
                    for _ in 0..2 {
                        forks.spawn(|| {
                            all_begun.wait();
                            // A panic would leave the other one waiting.
                            let forked = catch_unwind(AssertUnwindSafe(|| {
                                for _ in 0..40 {
                                    in_forked_child(|| {
                                        let first = sums[0].load(Ordering::Relaxed);
                                        sums.iter().all(|sum| sum.load(Ordering::Relaxed) == first)
                                            && runs_each_once(&pool, &sums)
                                            && runs_each_once(&other, &sums)
                                            && Pool::global()
                                                .is_ok_and(|global| runs_each_once(global, &sums))
                                    });
                                }
                            }));
                            all_forked.wait();
                            if let Err(payload) = forked {
                                std::panic::resume_unwind(payload);
                            }
                        });
                    }
                });
            }));
            stop.store(true, Ordering::Relaxed);
            if let Err(payload) = result {
                std::panic::resume_unwind(payload);
            }
        });
        assert!(runs_each_once(&pool, &sums), "the parent goes on");
    });
}

#[test]
fn a_forked_child_drops_and_forks_again() {
    within_time_limit(|| {
        let parents = pool(3);
        let counters = counters(20);
        assert!(runs_each_once(&parents, &counters));
        in_forked_child(|| {
            // Used here first.
            assert!(runs_each_once(&parents, &counters));
            in_forked_child(|| runs_each_once(&parents, &counters));
            assert!(runs_each_once(&parents, &counters));
            // Never used here: its threads are the parent's. And used here: joined.
            drop(pool(2));
            true
        });
        let mut parents = Some(parents);
        in_forked_child(|| {
            drop(parents.take());
            true
        });
        assert!(runs_each_once(parents.as_ref().expect("the parent's own"), &counters));
    });
}

#[test]
fn a_fork_from_a_task_does_not_hang_the_parent() {
    within_time_limit(|| {
        let pool = pool(2);
        let counters = counters(8);
        pool.run(2, &|_| in_forked_child(|| true));
        pool.run(1, &|_| in_forked_child(|| true));
        assert!(runs_each_once(&pool, &counters));
        in_forked_child(|| runs_each_once(&pool, &counters));
    });
}

#[test]
fn the_global_pool_reads_the_environment_of_its_process() {
    within_time_limit(|| {
        let here = Pool::global().expect("pool");
        assert!(std::ptr::eq(here, Pool::global().expect("pool")), "one per process");
        in_forked_child(|| {
            // SAFETY: the child has this one thread.
            unsafe { std::env::set_var("STEPWELL_THREADS", "5") };
            let pool = Pool::global().expect("pool");
            pool.threads() == 5 && runs_each_once(pool, &counters(30))
        });
        in_forked_child(|| {
            // SAFETY: as above.
            unsafe { std::env::set_var("STEPWELL_THREADS", "many") };
            let error = Pool::global().expect_err("not a count");
            // SAFETY: as above.
            unsafe { std::env::remove_var("STEPWELL_THREADS") };
            error.to_string().contains("`many`") && Pool::global().is_ok()
        });
    });
}

#[test]
fn ranks_of_a_host_share_its_cores() {
    within_time_limit(|| {
        let whole = Pool::new(&PoolConfig::default()).expect("pool").cpus().to_vec();
        for rank in 0..2 {
            in_forked_child(|| {
                // SAFETY: the child has this one thread.
                unsafe {
                    std::env::set_var("LOCAL_RANK", rank.to_string());
                    std::env::set_var("LOCAL_WORLD_SIZE", "2");
                }
                let pool = Pool::global().expect("pool");
                let expected = whole.len().div_ceil(2).max(1);
                let fits = (whole.len() / 2).max(1) <= pool.threads() && pool.threads() <= expected;
                // A launcher has bound this process: its mask is its share.
                let mut mask = CpuSet::new();
                whole.iter().take(whole.len() - 1).for_each(|&cpu| mask.set(cpu));
                let bound = whole.len() < 2 || {
                    sched_setaffinity(None, &mask).expect("mask");
                    Pool::new(&PoolConfig::default()).expect("pool").threads() == whole.len() - 1
                };
                fits && pool.cpus().iter().all(|cpu| whole.contains(cpu)) && bound
            });
        }
    });
}

#[test]
fn workers_are_pinned_to_their_cpus() {
    within_time_limit(|| {
        let pool = Pool::new(&PoolConfig::default()).expect("pool");
        assert_eq!(pool.threads(), pool.cpus().len());
        let distinct: HashSet<usize> = pool.cpus().iter().copied().collect();
        assert_eq!(distinct.len(), pool.threads());
        pool.run_on_each_worker(&|worker| assert_eq!(allowed_cpus(), [pool.cpus()[worker]]));
    });
}

#[test]
fn a_mask_of_one_cpu_gives_one_worker() {
    within_time_limit(|| {
        for cpu in allowed_cpus() {
            // The mask is this thread's only.
            let mut mask = CpuSet::new();
            mask.set(cpu);
            thread::spawn(move || {
                sched_setaffinity(None, &mask).expect("mask");
                let pool = Pool::new(&PoolConfig::default()).expect("pool");
                assert_eq!(pool.cpus(), [cpu]);
                assert!(runs_each_once(&pool, &counters(100)));
                let several = Pool::new(&PoolConfig { threads: Some(4), ..PoolConfig::default() })
                    .expect("pool");
                assert_eq!(several.cpus(), [cpu; 4]);
                assert!(runs_each_once(&several, &counters(100)));
            })
            .join()
            .expect("no panic");
        }
    });
}

#[test]
fn a_list_of_cpus_is_taken_as_it_is() {
    within_time_limit(|| {
        let mut cpus = allowed_cpus();
        cpus.reverse();
        let pool = Pool::new(&PoolConfig { cpus: Some(cpus.clone()), ..PoolConfig::default() })
            .expect("pool");
        assert_eq!(pool.cpus(), cpus);
        pool.run_on_each_worker(&|worker| assert_eq!(allowed_cpus(), [cpus[worker]]));
    });
}

#[test]
fn bad_configurations_are_value_errors() {
    within_time_limit(|| {
        let cpu = allowed_cpus()[0];
        for (threads, cpus, names) in [
            (Some(0), None, "`0`"),
            (Some(1_000_000), None, "`1000000`"),
            (None, Some(vec![]), "empty"),
            (None, Some(vec![60_000]), "`60000`"),
            (None, Some(vec![cpu, cpu]), "twice"),
            (Some(2), Some(vec![cpu]), "`2`"),
        ] {
            let error = Pool::new(&PoolConfig { threads, cpus }).expect_err("bad");
            assert!(
                matches!(error, Error::Value(_)) && error.to_string().contains(names),
                "{error}"
            );
        }
    });
}

/// State of a thread of this process; `S` is asleep, `None` ended.
fn thread_state(tid: i32) -> Option<char> {
    let text = std::fs::read_to_string(format!("/proc/self/task/{tid}/stat")).ok()?;
    text.rsplit_once(')')?.1.trim_start().chars().next()
}

/// Takes its time to go when its thread ends, and then counts.
struct SlowLeave(Cell<Option<&'static AtomicUsize>>);

impl Drop for SlowLeave {
    fn drop(&mut self) {
        if let Some(count) = self.0.get() {
            let begin = Instant::now();
            while begin.elapsed() < Duration::from_millis(20) {
                thread::yield_now();
            }
            count.fetch_add(1, Ordering::SeqCst);
        }
    }
}

thread_local! {
    static SLOW_LEAVE: SlowLeave = const { SlowLeave(Cell::new(None)) };
}

#[test]
fn idle_workers_sleep_and_dropping_joins_them() {
    static LEFT: AtomicUsize = AtomicUsize::new(0);
    within_time_limit(|| {
        let pool = pool(4);
        let tids: Vec<i32> = {
            let tids = Mutex::new(Vec::new());
            pool.run_on_each_worker(&|_| {
                SLOW_LEAVE.with(|leave| leave.0.set(Some(&LEFT)));
                tids.lock().expect("lock").push(gettid().as_raw_nonzero().get());
            });
            tids.into_inner().expect("lock")
        };
        assert_eq!(tids.len(), 4);
        let asleep = || tids.iter().all(|&tid| thread_state(tid) == Some('S'));
        wait_until("all workers asleep", asleep);
        assert!(runs_each_once(&pool, &counters(100)), "they wake up");
        wait_until("all workers asleep again", asleep);
        drop(pool);
        assert_eq!(
            LEFT.load(Ordering::SeqCst),
            4,
            "joined: they have ended, not only been told to"
        );
    });
}

#[test]
fn busy_and_unused_pools_can_be_dropped() {
    within_time_limit(|| {
        for threads in [1, 2, 6] {
            for jobs in 0..20 {
                let pool = pool(threads);
                for _ in 0..jobs {
                    pool.run(3, &|_| {});
                }
            }
        }
    });
}
