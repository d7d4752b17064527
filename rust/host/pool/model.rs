//! The crew and the fork gate under a model checker, which tries many orders of their threads.
//!
//! An order in which a wake-up is lost ends with threads that wait for ever: the checker fails
//! there. So a test that returns has also shown that its threads ended.

use shuttle::{check_pct, check_random};

use super::crew::{Balance, Crew};
use super::{Pool, Workers};
use crate::host::fork::{self, Gate};
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{Arc, thread};

/// Orders tried per test, by each of two strategies.
const ORDERS: usize = 2000;
/// How many times a thread is overtaken at a place that matters, in the second strategy.
const CHANGES: usize = 3;

fn check(body: impl Fn() + Send + Sync + Clone + 'static) {
    check_random(body.clone(), ORDERS);
    check_pct(body, ORDERS, CHANGES);
}

fn crew(workers: usize) -> Crew {
    Crew::start(&vec![0; workers], 0).expect("a crew").0
}

fn counters(len: usize) -> Vec<AtomicUsize> {
    (0..len).map(|_| AtomicUsize::new(0)).collect()
}

/// Runs a job and checks that every index came once, and that no task runs after its end.
fn runs_each_once(tasks: usize, run: impl FnOnce(&(dyn Fn(usize) + Sync))) {
    let counts = counters(tasks);
    let has_ended = AtomicBool::new(false);
    run(&|index| {
        assert!(!has_ended.load(Ordering::Relaxed), "task {index} after its job");
        counts[index].fetch_add(1, Ordering::Relaxed);
        assert!(!has_ended.load(Ordering::Relaxed), "task {index} outlives its job");
    });
    has_ended.store(true, Ordering::Relaxed);
    for (index, count) in counts.iter().enumerate() {
        assert_eq!(count.load(Ordering::Relaxed), 1, "index {index} of {tasks}");
    }
}

#[test]
fn every_index_once_in_jobs_back_to_back() {
    check(|| {
        let mut crew = crew(2);
        for tasks in [3, 1, 2] {
            runs_each_once(tasks, |task| {
                assert!(crew.run(2, tasks, Balance::Steal, task).is_none());
            });
        }
    });
}

#[test]
fn every_worker_runs_its_own() {
    check(|| {
        let mut crew = crew(3);
        for _ in 0..2 {
            runs_each_once(3, |task| assert!(crew.run(3, 3, Balance::Fixed, task).is_none()));
        }
    });
}

/// No other worker does what one misses, and a job is announced to it while it goes to sleep.
#[test]
fn a_worker_alone_misses_no_job() {
    check(|| {
        let mut crew = crew(1);
        for _ in 0..2 {
            runs_each_once(1, |task| assert!(crew.run(1, 1, Balance::Fixed, task).is_none()));
        }
    });
}

#[test]
fn dropping_joins_workers_that_may_not_have_begun() {
    check(|| drop(crew(3)));
}

#[test]
fn forks_wait_for_those_inside_and_keep_others_out() {
    check(|| {
        let gate = Arc::new(Gate::new());
        let inside = Arc::new(AtomicUsize::new(0));
        let mut threads = Vec::new();
        for _ in 0..2 {
            let (gate, inside) = (Arc::clone(&gate), Arc::clone(&inside));
            threads.push(thread::spawn(move || {
                for _ in 0..2 {
                    let _entered = gate.enter();
                    inside.fetch_add(1, Ordering::Relaxed);
                    inside.fetch_sub(1, Ordering::Relaxed);
                }
            }));
        }
        for _ in 0..2 {
            let (gate, inside) = (Arc::clone(&gate), Arc::clone(&inside));
            threads.push(thread::spawn(move || {
                gate.prepare();
                // The fork happens here. What the child finds is what stands now.
                for _ in 0..2 {
                    assert_eq!(inside.load(Ordering::Relaxed), 0, "a fork inside a job");
                }
                gate.after_in_parent();
            }));
        }
        for thread in threads {
            thread.join().expect("no assertion fails");
        }
    });
}

/// A task forked: its own entry is not counted in the child, whose threads enter and fork.
#[test]
fn a_child_of_a_task_begins_with_an_empty_gate() {
    check(|| {
        let gate = Arc::new(Gate::new());
        let before = gate.generation();
        let entered = gate.enter();
        {
            let _task = fork::TaskScope::new();
            gate.prepare();
            gate.after_in_child();
        }
        assert_ne!(gate.generation(), before);
        let other = thread::spawn({
            let gate = Arc::clone(&gate);
            move || drop(gate.enter())
        });
        drop(entered);
        gate.prepare();
        gate.after_in_parent();
        other.join().expect("no assertion fails");
    });
}

/// Two threads run jobs on one pool while a third forks: jobs take turns, their tasks may run jobs
/// of their own, and no fork lands inside one.
#[test]
fn callers_take_turns_around_a_fork() {
    check(|| {
        let pool = Pool::all_of(Workers::start(vec![0; 2], 0).expect("workers").0);
        let running = Arc::new(AtomicUsize::new(0));
        let callers: Vec<_> = (0..2)
            .map(|_| {
                let (pool, running) = (pool.clone(), Arc::clone(&running));
                thread::spawn(move || {
                    runs_each_once(2, |task| {
                        pool.run(2, &|index| {
                            running.fetch_add(1, Ordering::Relaxed);
                            pool.run(1, &|_| task(index));
                            running.fetch_sub(1, Ordering::Relaxed);
                        });
                    });
                })
            })
            .collect();
        fork::GATE.prepare();
        assert_eq!(running.load(Ordering::Relaxed), 0, "a fork inside a job");
        fork::GATE.after_in_parent();
        for caller in callers {
            caller.join().expect("no assertion fails");
        }
    });
}
