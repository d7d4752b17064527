//! Swaps: steps on a volume have the bits of steps in memory, with as few buffers as can be, and
//! what a drive does wrong ends the engine before anything is uploaded.

mod battery;
mod drives;
mod on_device;

use std::{
    num::NonZeroU64,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use battery::{Held, Layout, MomentsKind, ParamKind, Spread, pool_of, widest};
use drives::{Call, Drives, Effect};
use on_device::{
    Call as DeviceCall, Gated, OnDevice, SOON, STREAM, engine_with, finish, host_device, split,
    stepped, take,
};
use rustix::io::Errno;
use stepwell::{
    Error, Result,
    adam::{Hyper, tensor::AdamTensor},
    device::{Device, Lane},
    host::memory::AddressSpace,
    offload::{Engine, Update},
    state::chunk::CHUNK_LEN,
    stream::element::Dtype,
    tier::{
        Tier,
        swap::{Catalog, Config, Placed, Swap},
        volume::{Durability, EngineKind, Location, Options, Shape, Volume, found},
    },
};
use tempfile::TempDir;

/// Of more than one chunk, of exactly one, of a few elements.
const NUMELS: [usize; 4] = [3 * CHUNK_LEN + 77, CHUNK_LEN, 9, 2 * CHUNK_LEN - 1];

/// Tensors whose state is on a volume, and what they have to be.
struct Rig {
    all: Vec<OnDevice>,
    expected: Vec<Held>,
    /// Where the state of each is said to be.
    places: Vec<AddressSpace>,
    folders: TempDir,
    config: Config,
    count: u64,
    /// Whether the first step goes on from memory, and not from what the swap has.
    begins_in_memory: bool,
}

fn hyper() -> Hyper {
    Hyper { lr: 1e-3, weight_decay: 0.1, ..Hyper::default() }
}

impl Rig {
    fn new(all: Vec<OnDevice>, durability: Durability) -> Self {
        let folders = tempfile::tempdir().expect("a folder");
        let paths: Vec<_> = (0..2).map(|member| folders.path().join(member.to_string())).collect();
        paths.iter().for_each(|path| std::fs::create_dir(path).expect("a folder"));
        let space = |one: &OnDevice| {
            AddressSpace::new(one.held.moved(0).tensor().layout().slot_nbytes()).expect("addresses")
        };
        let config = Config {
            location: Location { name: "v".to_owned(), drives: paths },
            weights: Vec::new(),
            stripe_bytes: 64 << 10,
            durability,
            identity: 0,
            run: 7,
            packed: Vec::new(),
            ram_nbytes: 0,
            buffers_nbytes_max: usize::MAX,
            workers: 3,
            counts_each_step: false,
            commit_interval: NonZeroU64::MIN,
            options: Options { io_timeout: SOON, ..Options::default() },
        };
        Self {
            expected: all.iter().map(|one| one.held.moved(0)).collect(),
            places: all.iter().map(space).collect(),
            all,
            folders,
            config,
            count: 0,
            begins_in_memory: true,
        }
    }

    /// The same, with packed masters.
    fn packing(mut self, is_packed: bool) -> Self {
        self.config.packed = if is_packed { (0..self.all.len()).collect() } else { Vec::new() };
        self
    }

    fn of_split(durability: Durability) -> Self {
        let all = NUMELS.iter().enumerate().map(|(seed, &numel)| split(numel, seed as u64));
        Self::new(all.collect(), durability)
    }

    fn faulty(durability: Durability) -> (Self, Arc<Drives>) {
        let drives = Drives::new();
        let mut rig = Self::of_split(durability);
        rig.config.options.between = drives.between();
        (rig, drives)
    }

    fn places(&mut self) -> Vec<AdamTensor> {
        let each = self.all.iter_mut().zip(&self.places);
        each.map(|(one, space)| {
            one.held.tensor().map(|field, view| view.at(space.address() + field.offset))
        })
        .collect()
    }

    fn create(&mut self) -> Result<Arc<Swap>> {
        let places = self.places();
        Swap::create(&self.config, &places, &pool_of(2)).map(Arc::new)
    }

    fn open(&mut self) -> Result<(Arc<Swap>, Catalog)> {
        let places = self.places();
        let (swap, found) = Swap::open(&self.config, &places, &pool_of(2))?;
        Ok((Arc::new(swap), found))
    }

    fn engine(&self, device: Arc<dyn Device>, swap: &Arc<Swap>) -> Engine {
        let of: Vec<_> = (0..self.all.len()).map(Some).collect();
        let tier = Placed::new(Arc::clone(swap), &of).expect("a tier");
        engine_with(device, &self.all, 1, Arc::new(tier) as Arc<dyn Tier>, self.config.workers)
    }

    /// Submits the next step: of state in memory the first time, then of what is on the volume.
    fn submit(&mut self, engine: &Engine) {
        self.count += 1;
        take(engine, &mut self.all).expect("gradients");
        let (count, places) = (self.count, &self.places);
        let begins_in_memory = self.begins_in_memory;
        let update = |(index, one): (usize, &mut OnDevice)| {
            let mut update: Update = one.update(index, count, hyper());
            if count > 1 || !begins_in_memory {
                let layout = *update.tensor.layout();
                update.tensor =
                    update.tensor.map(|field, view| match layout.record_offset(&field) {
                        None => view,
                        Some(_) => view.at(places[index].address() + field.offset),
                    });
            }
            update
        };
        let updates: Vec<_> = self.all.iter_mut().enumerate().map(update).collect();
        // SAFETY: the tensors outlive the step, which every test waits for or drops the engine for.
        unsafe { engine.submit(&updates, &mut None, STREAM) }.expect("a step");
    }

    fn expect_step(&mut self) {
        for (one, expected) in self.all.iter().zip(&mut self.expected) {
            if self.count == 1 {
                *expected = stepped(one, 1, &hyper());
            } else {
                expected.step(widest(), self.count, &hyper());
            }
        }
    }

    fn step(&mut self, engine: &Engine) {
        if self.count == 0 {
            // Before the engine writes the weights.
            self.count = 1;
            self.expect_step();
            self.count = 0;
            self.submit(engine);
        } else {
            self.submit(engine);
            self.expect_step();
        }
        finish(engine);
    }

    /// Asserts that a swap that was opened again has the state and the weights of `expected`, but
    /// for fingerprints. They are read to `to`.
    fn assert_found(&self, swap: &Swap, index: usize, to: &mut Held, expected: &mut Held) {
        let never = AtomicBool::new(false);
        let (to, expected) = (to.tensor(), expected.tensor());
        let all = 0..to.layout().numel();
        // SAFETY: the tensors are held, and no step runs.
        unsafe {
            assert!(swap.read(index, &to, all, &never).expect("state"));
            assert!(swap.read_weights(index, to.weight(), &never).expect("weights"));
        }
        for ((name, found), (_, expected)) in to.written().zip(expected.written()) {
            let is_same = on_device::bytes(found) == on_device::bytes(expected);
            assert!(name == "fingerprints" || is_same, "{name} of tensor {index}");
        }
    }

    /// The weights, the device's copies, and the state that the swap has.
    fn assert_as_expected(&mut self, swap: &Swap, what: &str) {
        let never = AtomicBool::new(false);
        for (index, (one, expected)) in self.all.iter_mut().zip(&mut self.expected).enumerate() {
            one.assert_uploaded();
            let to = one.held.tensor();
            let all = 0..to.layout().numel();
            // SAFETY: the tensor is held, and no step runs.
            assert!(unsafe { swap.read(index, &to, all, &never) }.expect("state"));
            one.held.assert_same(expected, what);
        }
    }
}

/// Of other masters: `tests/test_offload_volume.py`.
#[test]
fn steps_have_the_bits_of_steps_in_memory_with_every_codec() {
    for (param, moments, is_packed) in [
        (ParamKind::Split, MomentsKind::Float32, false),
        (ParamKind::Split, MomentsKind::Bf16, false),
        (ParamKind::Split, MomentsKind::Q8, false),
        (ParamKind::Float32WithBf16, MomentsKind::Float32, false),
        (ParamKind::Float32WithBf16, MomentsKind::Float32, true),
        (ParamKind::Float32WithBf16, MomentsKind::Bf16, true),
        (ParamKind::Float32WithBf16, MomentsKind::Q8, true),
        (ParamKind::Float32WithF16, MomentsKind::Q8, false),
    ] {
        for durability in [Durability::None, Durability::Commit] {
            let layout = Layout::new(param, moments, Dtype::BFloat16);
            let mut rig = Rig::new(of(layout), durability).packing(is_packed);
            let swap = rig.create().expect("a swap");
            let engine = rig.engine(host_device(&rig.all), &swap);
            for _ in 0..3 {
                rig.step(&engine);
            }
            rig.assert_as_expected(&swap, "three steps");
        }
    }
}

fn of(layout: Layout) -> Vec<OnDevice> {
    let one = |(seed, &numel): (usize, &usize)| {
        OnDevice::new(Held::random(layout, numel, 0, Spread::Ordinary, seed as u64))
    };
    NUMELS.iter().enumerate().map(one).collect()
}

/// SWAP-4: the first step goes on from the weights, which are in host memory, and from zeros.
#[test]
fn a_master_that_no_step_has_written_is_the_weight() {
    for (param, is_packed) in [
        (ParamKind::Float32WithBf16, false),
        (ParamKind::Float32WithBf16, true),
        (ParamKind::Float32WithF16, false),
    ] {
        for durability in [Durability::None, Durability::Commit] {
            let layout = Layout::new(param, MomentsKind::Float32, Dtype::BFloat16);
            let mut all = of(layout);
            for one in &mut all {
                let rounded = one.held.weight_out.as_ref().expect("a weight").values();
                let zeros = vec![0.0; rounded.len()];
                one.held.write(&rounded, &zeros, &zeros);
            }
            let mut rig = Rig::new(all, durability).packing(is_packed);
            // The first chunk.
            rig.config.ram_nbytes = 1 << 20;
            let swap = rig.create().expect("a swap");
            for (index, (one, expected)) in rig.all.iter_mut().zip(&mut rig.expected).enumerate() {
                (0..one.held.numel).for_each(|at| one.held.param.set_value(at, f32::NAN));
                let to = one.held.tensor();
                let all = 0..to.layout().numel();
                // SAFETY: the tensor is held, and no step runs.
                let read = unsafe { swap.read(index, &to, all, &AtomicBool::new(false)) };
                assert!(read.expect("state"));
                one.held.assert_same(expected, "no step");
            }
            let engine = rig.engine(host_device(&rig.all), &swap);
            rig.begins_in_memory = false;
            rig.step(&engine);
            rig.assert_as_expected(&swap, "one step");
        }
    }
}

/// SWAP-1: more workers than buffers, and chunks that are not read between those that are.
#[test]
fn with_the_fewest_buffers_every_step_ends() {
    for durability in [Durability::None, Durability::Commit] {
        for ram_nbytes in [0, 1 << 20] {
            let mut rig = Rig::of_split(durability);
            rig.config.buffers_nbytes_max = 0;
            rig.config.workers = 4;
            rig.config.ram_nbytes = ram_nbytes;
            let swap = rig.create().expect("a swap");
            let (ram, buffers) = swap.memory_nbytes();
            assert!(ram <= ram_nbytes && buffers < 2 << 20, "{ram} and {buffers} bytes");
            let engine = rig.engine(host_device(&rig.all), &swap);
            for _ in 0..4 {
                rig.step(&engine);
            }
            rig.assert_as_expected(&swap, "four steps");
        }
    }
}

/// A look whether another thread has failed would end each of these waits as well, after .1 s.
#[test]
fn a_worker_that_waits_for_buffers_is_woken_when_it_has_them() {
    let mut rig = Rig::of_split(Durability::Commit);
    rig.config.buffers_nbytes_max = 0;
    rig.config.workers = 4;
    rig.config.ram_nbytes = 0;
    let swap = rig.create().expect("a swap");
    let engine = rig.engine(host_device(&rig.all), &swap);
    let begin = Instant::now();
    (0..80).for_each(|_| rig.step(&engine));
    assert!(begin.elapsed() < SOON, "80 steps took {:?}", begin.elapsed());
}

#[test]
fn state_that_no_step_has_written_reads_as_zeros() {
    let mut rig = Rig::of_split(Durability::None);
    let swap = rig.create().expect("a swap");
    let to = rig.all[0].held.tensor();
    let all = 0..to.layout().numel();
    // SAFETY: the tensor is held.
    assert!(unsafe { swap.read(0, &to, all.clone(), &AtomicBool::new(false)) }.expect("state"));
    for (name, view) in to.written().filter(|(name, _)| !["param", "fingerprints"].contains(name)) {
        assert!(on_device::bytes(view).iter().all(|&byte| byte == 0), "{name}");
    }
    // SAFETY: as above.
    let read = unsafe { swap.read(0, &to, all, &AtomicBool::new(true)) };
    assert!(!read.expect("state"), "it is interrupted");
}

/// Weights that have records of their own, and those that follow from their masters.
#[test]
fn a_commit_is_found_again_with_counts_and_weights() {
    for (param, is_packed) in [
        (ParamKind::Split, false),
        (ParamKind::Shadowed, false),
        (ParamKind::Float32, false),
        (ParamKind::Float32WithBf16, false),
        (ParamKind::Float32WithBf16, true),
        (ParamKind::Float32WithF16, false),
    ] {
        let layout = Layout::new(param, MomentsKind::Float32, Dtype::BFloat16);
        let mut rig = Rig::new(of(layout), Durability::Commit).packing(is_packed);
        rig.config.options.keep = true;
        rig.config.ram_nbytes = 1 << 20;
        let swap = rig.create().expect("a swap");
        let engine = rig.engine(host_device(&rig.all), &swap);
        rig.step(&engine);
        rig.step(&engine);
        drop((engine, swap));
        rig.config.ram_nbytes = 2 << 20;
        let (swap, found) = rig.open().expect("the volume");
        assert_eq!(found, Catalog { run: 7, counts: vec![2; 4] });
        let never = AtomicBool::new(false);
        for (index, one) in rig.all.iter_mut().enumerate() {
            let weight = one.held.tensor().weight();
            let before = on_device::bytes(weight);
            // SAFETY: the tensor is held, and no step runs.
            unsafe {
                zero(weight);
                assert!(swap.read_weights(index, weight, &never).expect("weights"));
            }
            assert!(on_device::bytes(weight) == before, "{param:?}");
        }
        rig.assert_as_expected(&swap, "opened again");
        let engine = rig.engine(host_device(&rig.all), &swap);
        rig.step(&engine);
        rig.assert_as_expected(&swap, "a step after that");
    }
}

/// SWAP-6. The state of tensor 0 and some of the next is in host memory.
#[test]
fn a_commit_every_few_steps_has_the_state_and_the_weights_of_its_step() {
    for (param, is_packed) in [
        (ParamKind::Split, false),
        (ParamKind::Shadowed, false),
        (ParamKind::Float32, false),
        (ParamKind::Float32WithBf16, false),
        (ParamKind::Float32WithBf16, true),
    ] {
        let layout = Layout::new(param, MomentsKind::Float32, Dtype::BFloat16);
        let mut rig = Rig::new(of(layout), Durability::Commit).packing(is_packed);
        rig.config.options.keep = true;
        rig.config.ram_nbytes = 2 << 20;
        rig.config.commit_interval = NonZeroU64::new(3).expect("above 0");
        let swap = rig.create().expect("a swap");
        let engine = rig.engine(host_device(&rig.all), &swap);
        let mut committed = Vec::new();
        for step in 1..=5 {
            assert_eq!(swap.commits_next(), step == 3);
            rig.step(&engine);
            rig.assert_as_expected(&swap, "between steps");
            if step == 3 {
                committed = rig.all.iter().map(|one| one.held.moved(0)).collect();
            }
        }
        assert_eq!(swap.volume().step(), Some(3));
        drop((engine, swap));
        let (swap, found) = rig.open().expect("the volume");
        assert_eq!(found.counts, [3; 4], "{param:?}");
        for (index, expected) in committed.iter_mut().enumerate() {
            let mut held = expected.moved(0);
            rig.assert_found(&swap, index, &mut held, expected);
        }
        // What the host has is of other steps.
        for (one, committed) in rig.all.iter_mut().zip(&mut committed) {
            one.held = committed.moved(0);
        }
        rig.count = 3;
        rig.expected = committed;
        rig.config.commit_interval = NonZeroU64::MIN;
        let engine = rig.engine(host_device(&rig.all), &swap);
        rig.step(&engine);
        rig.assert_as_expected(&swap, "a step after that");
    }
}

/// The caller has to give the weights that steps without a commit have left behind.
#[test]
fn a_commit_without_a_step_takes_the_weights_that_are_behind() {
    let mut rig = Rig::of_split(Durability::Commit);
    rig.config.options.keep = true;
    rig.config.ram_nbytes = 1 << 20;
    rig.config.commit_interval = NonZeroU64::new(100).expect("above 0");
    let swap = rig.create().expect("a swap");
    let engine = rig.engine(host_device(&rig.all), &swap);
    rig.step(&engine);
    rig.step(&engine);
    assert_eq!(swap.weights_behind(), [0, 1, 2, 3]);
    let never = AtomicBool::new(false);
    for (index, one) in rig.all.iter_mut().enumerate() {
        let weight = one.held.tensor().weight();
        // SAFETY: the tensor is held, and no step runs.
        unsafe {
            let other = weight.part(0..weight.numel() - 1);
            swap.write_weights(index, other, &never).expect_err("too few");
            assert!(!swap.write_weights(index, weight, &AtomicBool::new(true)).expect("told"));
            assert!(swap.write_weights(index, weight, &never).expect("weights"));
        }
    }
    assert_eq!(swap.weights_behind(), [0; 0]);
    assert_eq!(swap.volume().step(), None);
    swap.commit_now().expect("a commit");
    swap.commit_now().expect("nothing to commit");
    assert_eq!(swap.volume().step(), Some(2));
    // Another step, which cannot be committed yet.
    rig.step(&engine);
    let error = swap.commit_now().expect_err("weights are behind").to_string();
    assert!(error.contains("without the weights of tensor `0`"), "{error}");
    swap.check().expect("nothing has failed");
    rig.step(&engine);
    drop((engine, swap));
    let (swap, found) = rig.open().expect("the volume");
    assert_eq!((found.counts, swap.volume().step()), (vec![2; 4], Some(2)));
}

/// A signal's handler may ask for a commit while its thread waits for one.
#[test]
fn a_commit_within_another_is_refused_and_harms_nothing() {
    let (mut rig, drives) = Rig::faulty(Durability::Commit);
    rig.config.commit_interval = NonZeroU64::new(100).expect("above 0");
    let swap = rig.create().expect("a swap");
    let engine = rig.engine(host_device(&rig.all), &swap);
    rig.step(&engine);
    let never = AtomicBool::new(false);
    let weights: Vec<_> = rig.all.iter_mut().map(|one| one.held.tensor().weight()).collect();
    for (index, &weight) in weights.iter().enumerate() {
        // SAFETY: the tensor is held, and no step runs.
        assert!(unsafe { swap.write_weights(index, weight, &never) }.expect("weights"));
    }
    drives.fault(1, Call::Sync, 0, Effect::Hangs);
    std::thread::scope(|scope| {
        let outer = scope.spawn(|| swap.commit_now());
        assert!(drives.hangs(SOON));
        // SAFETY: as above.
        let inner = unsafe { swap.write_weights(0, weights[0], &never) };
        for error in [swap.commit_now().expect_err("within"), inner.expect_err("within")] {
            assert!(error.to_string().contains("while one is being made"), "{error}");
        }
        drives.release();
        outer.join().expect("no panic").expect("a commit");
    });
    assert_eq!(swap.volume().step(), Some(1));
    swap.check().expect("nothing has failed");
    rig.step(&engine);
    rig.assert_as_expected(&swap, "a step after that");
}

/// With the fewest buffers all are in writes.
#[test]
fn state_can_be_read_behind_weights_that_are_being_written() {
    let mut rig = Rig::of_split(Durability::Commit);
    rig.config.buffers_nbytes_max = 1;
    rig.config.commit_interval = NonZeroU64::new(100).expect("above 0");
    let swap = rig.create().expect("a swap");
    let engine = rig.engine(host_device(&rig.all), &swap);
    rig.step(&engine);
    let never = AtomicBool::new(false);
    for (index, one) in rig.all.iter_mut().enumerate() {
        // SAFETY: the tensor is held, and no step runs.
        unsafe { swap.write_weights(index, one.held.tensor().weight(), &never) }.expect("weights");
    }
    rig.assert_as_expected(&swap, "behind the writes");
    rig.step(&engine);
    rig.assert_as_expected(&swap, "a step after that");
}

/// Steps between commits write as much as those of a volume without, and no byte more.
#[test]
fn steps_between_commits_write_no_weights() {
    let written = |durability, interval| {
        let mut rig = Rig::of_split(durability);
        rig.config.commit_interval = NonZeroU64::new(interval).expect("above 0");
        let swap = rig.create().expect("a swap");
        let engine = rig.engine(host_device(&rig.all), &swap);
        let mut written = Vec::new();
        for _ in 0..4 {
            let before = swap.volume().bytes_moved();
            rig.step(&engine);
            let now = swap.volume().bytes_moved();
            written.push((now.0 - before.0, now.1 - before.1));
        }
        written
    };
    let none = written(Durability::None, 1);
    let every = written(Durability::Commit, 1);
    let third = written(Durability::Commit, 3);
    assert_eq!([third[0], third[1], third[3]], [none[0], none[1], none[3]]);
    assert_eq!(third[2], every[2]);
    assert!(every[2].1 > none[2].1 + 2 * NUMELS[0] as u64);
}

/// One that was resumed may go on in two runs, whose next steps are told apart.
#[test]
fn a_commit_says_which_run_made_it() {
    let layout = Layout::new(ParamKind::Split, MomentsKind::Float32, Dtype::BFloat16);
    let mut rig = Rig::new(of(layout), Durability::Commit);
    rig.config.options.keep = true;
    let swap = rig.create().expect("a swap");
    let engine = rig.engine(host_device(&rig.all), &swap);
    rig.step(&engine);
    drop((engine, swap));
    rig.config.run = u64::MAX;
    let (swap, found) = rig.open().expect("the volume");
    assert_eq!(found.run, 7);
    drop(swap);
    let (swap, found) = rig.open().expect("the volume");
    assert_eq!(found.run, 7, "no step was committed");
    let engine = rig.engine(host_device(&rig.all), &swap);
    rig.step(&engine);
    drop((engine, swap));
    rig.config.run = 8;
    let (_, found) = rig.open().expect("the volume");
    assert_eq!(found.run, u64::MAX);
}

/// A commit writes what the next step cannot go on without, and no byte more.
#[test]
fn weights_that_follow_from_masters_are_not_written() {
    for (param, is_packed, weight_nbytes) in [
        (ParamKind::Split, false, 2),
        (ParamKind::Float32WithBf16, false, 0),
        (ParamKind::Float32WithBf16, true, 2),
    ] {
        let layout = Layout::new(param, MomentsKind::Float32, Dtype::BFloat16);
        let written = |durability| {
            let mut rig = Rig::new(of(layout), durability).packing(is_packed);
            let swap = rig.create().expect("a swap");
            let engine = rig.engine(host_device(&rig.all), &swap);
            rig.step(&engine);
            let before = swap.volume().bytes_moved().1;
            rig.step(&engine);
            swap.volume().bytes_moved().1 - before
        };
        let numel: u64 = NUMELS.iter().map(|&numel| numel as u64).sum();
        let more = written(Durability::Commit) - written(Durability::None);
        // Blocks of records of a few elements, the catalog, and both copies of the index.
        let rest = 64 << 10;
        let weights = weight_nbytes * numel;
        assert!((weights..weights + rest).contains(&more), "{param:?}: {more} bytes more");
    }
}

/// 17 bits and a checksum in place of 32.
#[test]
fn packed_masters_take_half_of_the_space() {
    let layout = Layout::new(ParamKind::Float32WithBf16, MomentsKind::Q8, Dtype::BFloat16);
    let moved = |is_packed| {
        let mut rig = Rig::new(of(layout), Durability::None).packing(is_packed);
        let swap = rig.create().expect("a swap");
        let engine = rig.engine(host_device(&rig.all), &swap);
        rig.step(&engine);
        swap.volume().bytes_moved().1
    };
    let numel: u64 = NUMELS.iter().map(|&numel| numel as u64).sum();
    let saved = moved(false) - moved(true);
    let expected = numel * 15 / 8;
    let rest = 8 * 4096;
    assert!((expected - rest..expected + rest).contains(&saved), "{saved} bytes");
}

/// SWAP-7: the weight that a packed master is beside.
#[test]
fn a_weight_that_was_written_loses_its_packed_master_and_says_so() {
    for ram_nbytes in [0, 32 << 20] {
        let layout = Layout::new(ParamKind::Float32WithBf16, MomentsKind::Q8, Dtype::BFloat16);
        let mut rig = Rig::new(of(layout), Durability::Commit).packing(true);
        rig.config.ram_nbytes = ram_nbytes;
        let swap = rig.create().expect("a swap");
        let engine = rig.engine(host_device(&rig.all), &swap);
        rig.step(&engine);
        let weight = rig.all[0].held.weight_out.as_mut().expect("a weight");
        weight.set_value(CHUNK_LEN + 5, 3.25);
        let to = rig.all[0].held.tensor();
        let never = AtomicBool::new(false);
        // SAFETY: the tensor is held, and no step runs.
        let (first, both) = unsafe {
            (swap.read(0, &to, 0..CHUNK_LEN, &never), swap.read(0, &to, 0..CHUNK_LEN + 1, &never))
        };
        assert!(first.expect("its weight is as it was"));
        let said = both.expect_err("written").to_string();
        assert!(said.contains("weights in host memory were changed"), "{said}");
        assert!(said.contains(&format!("elements from `{CHUNK_LEN}` on")), "{said}");
        rig.submit(&engine);
        let error = engine.finish(STREAM, SOON).expect_err("a step that cannot be made");
        assert!(error.to_string().contains("weights in host memory were changed"), "{error}");
    }
}

#[test]
fn only_a_master_of_bf16_weights_is_packed() {
    for param in [ParamKind::Split, ParamKind::Float32, ParamKind::Float32WithF16] {
        let layout = Layout::new(param, MomentsKind::Float32, Dtype::BFloat16);
        let mut rig = Rig::new(of(layout), Durability::None).packing(true);
        let said = rig.create().expect_err("refused").to_string();
        assert!(said.contains("of tensor `0` is to be packed, expected an fp32"), "{said}");
    }
}

/// # Safety
/// The memory is alive, and nothing else uses it.
unsafe fn zero(view: stepwell::stream::view::View) {
    let begin = std::ptr::with_exposed_provenance_mut::<u8>(view.address());
    // SAFETY: passed on from the caller.
    unsafe { begin.write_bytes(0, view.nbytes()) };
}

#[test]
fn another_volume_is_refused_and_stays() {
    let mut rig = Rig::of_split(Durability::Commit);
    rig.config.options.keep = true;
    let swap = rig.create().expect("a swap");
    drop(swap);
    rig.config.options.keep = false;
    let error = rig.open().expect_err("no step");
    assert!(error.to_string().contains("has no committed step"), "{error}");
    rig.config.options.keep = true;
    std::fs::remove_dir_all(rig.folders.path().join("0")).expect("removed");
    std::fs::remove_dir_all(rig.folders.path().join("1")).expect("removed");
    for member in 0..2 {
        std::fs::create_dir(rig.folders.path().join(member.to_string())).expect("a folder");
    }
    let swap = rig.create().expect("a swap");
    let engine = rig.engine(host_device(&rig.all), &swap);
    rig.step(&engine);
    drop((engine, swap));
    rig.config.options.keep = false;
    let mut other = Rig::new(vec![split(5, 1)], Durability::Commit);
    other.config = rig.config.clone();
    let error = other.open().expect_err("of others");
    assert!(error.to_string().contains("other parameters"), "{error}");
    rig.open().expect("it is still there");
}

/// What records of a volume hold.
fn records_of(volume: &Volume) -> Vec<Vec<u8>> {
    let each = 0..volume.num_records();
    each.map(|record| {
        let nbytes = volume.record_nbytes(record).expect("a record");
        let buffer = volume.buffer(SOON).expect("a free buffer");
        let mut ticket = volume.read(record, buffer).expect("begun");
        let buffer = ticket.wait(SOON).expect("read").expect("over soon");
        buffer.as_slice()[..nbytes].to_vec()
    })
    .collect()
}

/// A volume of the same name, with these records.
fn volume_of(records: &[Vec<u8>], location: &Location, options: &Options) {
    let shape = Shape::new(records.iter().map(Vec::len).collect());
    let volume = Volume::create(location, &shape, options, &pool_of(2)).expect("a volume");
    for (record, bytes) in records.iter().enumerate() {
        let mut buffer = volume.buffer(SOON).expect("a free buffer");
        buffer.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        let mut ticket = volume.write(record, 1, buffer).expect("begun");
        ticket.wait(SOON).expect("written").expect("over soon");
    }
    volume.commit(1).expect("a commit");
}

/// Its catalog is at the end in all of them, and has other bytes in each.
#[test]
fn a_volume_of_another_release_is_refused_with_both_versions() {
    let mut rig = Rig::of_split(Durability::Commit);
    rig.config.options.keep = true;
    let swap = rig.create().expect("a swap");
    let engine = rig.engine(host_device(&rig.all), &swap);
    rig.step(&engine);
    drop((engine, swap));
    let Config { location, options, .. } = rig.config.clone();
    let made = Volume::open(&location, &options, &pool_of(2)).expect("the volume");
    let records = records_of(&made);
    drop(made);
    let (catalog, states) = records.split_last().expect("a catalog");
    let (head, tensors) = catalog.split_at(40);
    let (magic, identity, run) = (&head[..8], &head[24..32], &head[32..]);
    let count = (NUMELS.len() as u32).to_le_bytes();
    let state_format = 1_u32.to_le_bytes();
    let before_runs = [magic, &state_format, &count, identity, tensors].concat();
    let with_runs = [magic, &state_format, &count, identity, run, tensors].concat();
    let later = [magic, &9_u32.to_le_bytes(), b"of any length"].concat();
    let mut of_other_state = catalog.clone();
    of_other_state[12] = 7;
    for (bytes, said) in [
        (before_runs, "the catalog of version `1`, expected 3"),
        (with_runs, "the catalog of version `1`, expected 3"),
        (later, "the catalog of version `9`, expected 3"),
        (of_other_state, "the state format of version `7`, expected 1"),
        (b"swstates".to_vec(), "other parameters"),
        (catalog[..catalog.len() - 1].to_vec(), "other parameters"),
    ] {
        found::remove(&location, SOON).expect("removed");
        volume_of(&[states, &[bytes]].concat(), &location, &options);
        let error = rig.open().expect_err("of another release").to_string();
        assert!(error.contains(said) && error.contains("hint: "), "{error}");
    }
    found::remove(&location, SOON).expect("it is still there");
    volume_of(&records, &location, &options);
    rig.open().expect("the records as they were");
}

/// A step that a fault ends: its error, and what was uploaded in it.
fn failed_step(rig: &mut Rig, device: &Arc<Gated>, engine: &Engine) -> (Error, usize) {
    device.calls.lock().expect("no panic").clear();
    rig.submit(engine);
    let error = engine.finish(STREAM, SOON).expect_err("a step that a fault ends");
    let is_upload = |call: &DeviceCall| matches!(call, DeviceCall::Copy(Lane::Upload, _));
    let calls = device.calls.lock().expect("no panic");
    (error, calls.iter().filter(|(_, call)| is_upload(call)).count())
}

#[test]
fn a_drive_that_fails_ends_the_engine_and_nothing_is_uploaded() {
    let io = Effect::Fails(Errno::IO);
    for (call, effect, said) in [
        (Call::Read, io, "cannot read record"),
        (Call::Write, io, "cannot write record"),
        (Call::Sync, io, "cannot sync"),
        (Call::Write, Effect::Fails(Errno::NOSPC), "cannot write record"),
        (Call::Read, Effect::Flips(100), "checksum"),
        (Call::Read, Effect::Short(0), "truncated"),
    ] {
        let (mut rig, drives) = Rig::faulty(Durability::Commit);
        rig.config.options.keep = true;
        let device = Arc::new(Gated::new(&rig.all));
        let swap = rig.create().expect("a swap");
        let engine = rig.engine(Arc::clone(&device) as Arc<dyn Device>, &swap);
        rig.step(&engine);
        drives.fault(1, call, 0, effect);
        let (error, uploads) = failed_step(&mut rig, &device, &engine);
        let text = error.to_string();
        assert!(text.contains("member `1`") && text.contains(said), "{call:?}: {text}");
        assert_eq!(uploads, 0, "{call:?}");
        // Every call after it says so.
        assert!(engine.finish(STREAM, SOON).is_err());
        drop((engine, swap));
        drives.repair();
        let (swap, found) = rig.open().expect("the committed step");
        assert_eq!(found.counts, [1; 4], "{call:?}");
        for index in 0..rig.all.len() {
            let (mut held, mut expected) =
                (rig.all[index].held.moved(0), rig.expected[index].moved(0));
            rig.assert_found(&swap, index, &mut held, &mut expected);
        }
    }
}

/// The step that fails may be one whose weights were used: the volume is at its last commit.
#[test]
fn a_drive_that_fails_between_commits_leaves_the_last_one() {
    for (steps, call) in [(2, Call::Write), (2, Call::Read), (3, Call::Sync), (3, Call::Write)] {
        let (mut rig, drives) = Rig::faulty(Durability::Commit);
        rig.config.options.keep = true;
        rig.config.commit_interval = NonZeroU64::new(2).expect("above 0");
        let device = Arc::new(Gated::new(&rig.all));
        let swap = rig.create().expect("a swap");
        let engine = rig.engine(Arc::clone(&device) as Arc<dyn Device>, &swap);
        let mut committed = Vec::new();
        for step in 1..=steps {
            rig.step(&engine);
            if step == 2 {
                committed = rig.expected.iter().map(|one| one.moved(0)).collect();
            }
        }
        drives.fault(1, call, 0, Effect::Fails(Errno::IO));
        failed_step(&mut rig, &device, &engine);
        assert!(engine.finish(STREAM, SOON).is_err());
        swap.commit_now().expect_err("the step failed");
        drop((engine, swap));
        drives.repair();
        let (swap, found) = rig.open().expect("the committed step");
        assert_eq!((found.counts, swap.volume().step()), (vec![2; 4], Some(2)), "{call:?}");
        for (index, expected) in committed.iter_mut().enumerate() {
            let mut held = expected.moved(0);
            rig.assert_found(&swap, index, &mut held, expected);
        }
    }
}

#[test]
fn a_drive_that_does_not_answer_is_given_up() {
    let (mut rig, drives) = Rig::faulty(Durability::None);
    rig.config.options.io_timeout = Duration::from_millis(300);
    let device = Arc::new(Gated::new(&rig.all));
    let swap = rig.create().expect("a swap");
    let engine = rig.engine(Arc::clone(&device) as Arc<dyn Device>, &swap);
    rig.step(&engine);
    drives.fault(0, Call::Read, 1, Effect::Hangs);
    let (error, _) = failed_step(&mut rig, &device, &engine);
    assert!(error.to_string().contains("have not answered for"), "{error}");
    drives.release();
}

/// Its reads still have all buffers when the next call wants one.
#[test]
fn state_can_be_read_after_a_read_that_was_interrupted_while_drives_were_slow() {
    let (mut rig, drives) = Rig::faulty(Durability::None);
    rig.config.buffers_nbytes_max = 0;
    let swap = rig.create().expect("a swap");
    let engine = rig.engine(host_device(&rig.all), &swap);
    rig.step(&engine);
    (0..2).for_each(|member| drives.fault(member, Call::Read, 0, Effect::Hangs));
    let to = rig.all[0].held.tensor();
    let all = 0..to.layout().numel();
    let is_interrupted = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // SAFETY: the tensor is held, and no step runs.
        let read = || unsafe { swap.read(0, &to, all.clone(), &is_interrupted) };
        let interrupted = scope.spawn(read);
        assert!(drives.hangs(SOON));
        is_interrupted.store(true, Ordering::Relaxed);
        let is_whole = interrupted.join().expect("no panic").expect("nothing failed");
        assert!(!is_whole, "it is interrupted while the drives hang");
        assert!(drives.hangs(Duration::ZERO));
        is_interrupted.store(false, Ordering::Relaxed);
        let next = scope.spawn(read);
        drives.release();
        assert!(next.join().expect("no panic").expect("state"));
    });
    rig.assert_as_expected(&swap, "a step");
}

#[test]
fn weights_can_be_read_after_a_read_that_was_interrupted_while_drives_were_slow() {
    let (mut rig, drives) = Rig::faulty(Durability::Commit);
    let swap = rig.create().expect("a swap");
    let engine = rig.engine(host_device(&rig.all), &swap);
    rig.step(&engine);
    (0..2).for_each(|member| drives.fault(member, Call::Read, 0, Effect::Hangs));
    let weight = rig.all[0].held.tensor().weight();
    let before = on_device::bytes(weight);
    // SAFETY: the tensor is held, and no step runs.
    unsafe { zero(weight) };
    let is_interrupted = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // SAFETY: as above.
        let read = || unsafe { swap.read_weights(0, weight, &is_interrupted) };
        let interrupted = scope.spawn(read);
        assert!(drives.hangs(SOON));
        is_interrupted.store(true, Ordering::Relaxed);
        let is_whole = interrupted.join().expect("no panic").expect("nothing failed");
        assert!(!is_whole, "it is interrupted while the drives hang");
        is_interrupted.store(false, Ordering::Relaxed);
        let next = scope.spawn(read);
        drives.release();
        assert!(next.join().expect("no panic").expect("weights"));
    });
    assert!(on_device::bytes(weight) == before);
}

#[test]
fn a_full_drive_is_an_error_when_the_swap_is_made() {
    let (mut rig, drives) = Rig::faulty(Durability::None);
    drives.fault(1, Call::Allocate, 0, Effect::Fails(Errno::NOSPC));
    let error = rig.create().expect_err("no space");
    assert!(error.to_string().contains("member `1`"), "{error}");
    let files = |member: &str| std::fs::read_dir(rig.folders.path().join(member)).expect("one");
    assert_eq!(files("0").count() + files("1").count(), 0);
}

#[test]
fn a_tensor_that_is_half_on_the_volume_is_refused() {
    let mut rig = Rig::of_split(Durability::None);
    rig.config.options.engine = EngineKind::Positional;
    let swap = rig.create().expect("a swap");
    let engine = rig.engine(host_device(&rig.all), &swap);
    rig.step(&engine);
    let begin = rig.places[0].address();
    take(&engine, &mut rig.all).expect("gradients");
    let mut update = rig.all[0].update(0, 2, hyper());
    update.tensor = update.tensor.map(|field, view| match field.part.name {
        "exp_avg" => view.at(begin + field.offset),
        _ => view,
    });
    // SAFETY: the tensors outlive the step, which is waited for.
    unsafe { engine.submit(&[update], &mut None, STREAM) }.expect("a step");
    let error = engine.finish(STREAM, SOON).expect_err("half");
    assert!(error.to_string().contains("all or nothing"), "{error}");
}
