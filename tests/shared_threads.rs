//! Engines share the threads of the process: what one waits for holds no other one up.

mod battery;
mod forked;
mod on_device;

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use battery::{Held, pool_of};
use forked::in_forked_child;
use on_device::{
    OnDevice, Resumed, STREAM, engine_in, finish, host_device, split, stepped, submit, take,
    tier::Watched, wait_until,
};
use stepwell::{
    adam::Hyper,
    device::{Device, Lane, host::HostDevice},
    host::pool::Pool,
    offload::Engine,
    tier::{Tier, ram::Ram},
};

/// More than there are threads that move jobs on, before anything waits for one.
const WAITING: usize = 6;

struct Model {
    engine: Engine,
    device: Arc<HostDevice>,
    all: [OnDevice; 1],
    expected: Held,
}

impl Model {
    fn new(pool: &Pool, tier: Arc<dyn Tier>, seed: usize) -> Self {
        let all = [split(700, seed as u64 + 1)];
        let device = host_device(&all);
        let shared = pool.part(1 + seed % 2).expect("a part");
        let engine = engine_in(shared, Arc::clone(&device) as Arc<dyn Device>, &all, 1, tier);
        Self { expected: stepped(&all[0], 1, &Hyper::default()), engine, device, all }
    }

    fn begin(&mut self) {
        take(&self.engine, &mut self.all).expect("a gradient");
        submit(&self.engine, &mut self.all, 1, Hyper::default()).expect("a step");
    }

    fn end(&mut self) {
        finish(&self.engine);
        self.all[0].held.assert_same(&mut self.expected, "its step");
        self.all[0].assert_uploaded();
    }
}

#[test]
fn an_engine_steps_while_others_wait_for_gradients() {
    let pool = pool_of(2);
    let mut late: Vec<_> =
        (0..WAITING).map(|seed| Model::new(&pool, Arc::new(Ram), seed)).collect();
    let devices: Vec<_> = late.iter().map(|one| Arc::clone(&one.device)).collect();
    let resumed: Vec<_> = devices.iter().map(|device| Resumed(device)).collect();
    for one in &mut late {
        one.device.pause(Lane::Download, true);
        one.begin();
    }
    for seed in 0..2 {
        let mut other = Model::new(&pool, Arc::new(Ram), seed);
        other.begin();
        other.end();
    }
    assert!(late.iter().all(|one| one.engine.is_busy()));
    drop(resumed);
    late.iter_mut().for_each(Model::end);
}

#[test]
fn an_engine_steps_while_others_wait_for_drives_and_uploads() {
    let pool = pool_of(2);
    let slow: [_; 3] = std::array::from_fn(|_| Arc::new(Watched::default()));
    for (number, tier) in slow.iter().enumerate() {
        // Of the first the commit is late, of the others what is fetched.
        tier.is_commit_held.store(number == 0, Ordering::Relaxed);
        tier.hold(true);
    }
    let mut waiting: Vec<_> = slow
        .iter()
        .enumerate()
        .map(|(seed, tier)| Model::new(&pool, Arc::clone(tier) as Arc<dyn Tier>, seed))
        .collect();
    let mut unsent = Model::new(&pool, Arc::new(Ram), 3);
    let device = Arc::clone(&unsent.device);
    let resumed = Resumed(&device);
    device.pause(Lane::Upload, true);
    waiting.iter_mut().for_each(Model::begin);
    unsent.begin();
    let mut other = Model::new(&pool, Arc::new(Ram), 4);
    other.begin();
    other.end();
    assert!(waiting.iter().all(|one| one.engine.is_busy()));
    drop(resumed);
    unsent.end();
    slow.iter().for_each(|tier| tier.hold(false));
    waiting.iter_mut().for_each(Model::end);
}

/// Dropping waits for the engine's own step, and for no other's.
#[test]
fn an_engine_is_dropped_while_another_waits() {
    let pool = pool_of(2);
    let mut late = Model::new(&pool, Arc::new(Ram), 1);
    let device = Arc::clone(&late.device);
    let resumed = Resumed(&device);
    device.pause(Lane::Download, true);
    late.begin();
    let mut other = Model::new(&pool, Arc::new(Ram), 2);
    other.begin();
    let Model { engine, device, mut all, mut expected } = other;
    drop(engine);
    assert_eq!(Arc::strong_count(&device), 1, "a thread still has it");
    all[0].held.assert_same(&mut expected, "its step");
    assert!(late.engine.is_busy());
    drop(resumed);
    late.end();
}

#[test]
fn a_job_runs_beside_one_that_blocks() {
    let pool = pool_of(2);
    let mut late = Model::new(&pool, Arc::new(Ram), 1);
    let device = Arc::clone(&late.device);
    let resumed = Resumed(&device);
    device.pause(Lane::Download, true);
    late.begin();
    let begun = AtomicUsize::new(0);
    pool.run(7, &|_| {
        begun.fetch_add(1, Ordering::Relaxed);
    });
    assert_eq!(begun.load(Ordering::Relaxed), 7);
    assert!(late.engine.is_busy());
    drop(resumed);
    wait_until(|| !late.engine.is_busy());
    assert!(late.engine.finish(STREAM, on_device::SOON).expect("a step that works"));
    late.end();
}

/// A child starts its own, also where the parent's are at work.
#[test]
fn a_forked_child_has_threads_of_its_own() {
    let pool = pool_of(2);
    let mut late = Model::new(&pool, Arc::new(Ram), 1);
    let device = Arc::clone(&late.device);
    let resumed = Resumed(&device);
    device.pause(Lane::Upload, true);
    late.begin();
    wait_until(|| !late.engine.is_busy());
    in_forked_child(|| {
        let mut own = Model::new(&pool, Arc::new(Ram), 2);
        own.begin();
        own.end();
        true
    });
    drop(resumed);
    late.end();
}
