//! Commits of swaps: what they hold, what they cost, and what is found again.

mod battery;
mod drives;
mod on_device;
mod swap_rig;

use std::{
    num::NonZeroU64,
    sync::{Arc, atomic::AtomicBool},
};

use battery::{Layout, MomentsKind, ParamKind, pool_of};
use drives::{Call, Effect};
use on_device::{Gated, SOON, STREAM, host_device, split};
use rustix::io::Errno;
use stepwell::{
    device::Device,
    stream::element::Dtype,
    tier::{
        swap::{Catalog, Config, Swap},
        volume::{Durability, Location, Options, Shape, Volume, found},
    },
};
use swap_rig::{NUMELS, Rig, failed_step, of, zero};

/// Parameters whose weights have records of their own, and those that follow from their masters;
/// and whether these are packed.
const PARAMS: [(ParamKind, bool); 5] = [
    (ParamKind::Split, false),
    (ParamKind::Shadowed, false),
    (ParamKind::Float32, false),
    (ParamKind::Float32WithBf16, false),
    (ParamKind::Float32WithBf16, true),
];

/// A rig whose volume commits and is kept.
fn kept(param: ParamKind, is_packed: bool, ram_nbytes: usize) -> Rig {
    let mut rig = Rig::of_kind(param, MomentsKind::Float32, Durability::Commit).packing(is_packed);
    rig.config.options.keep = true;
    rig.config.ram_nbytes = ram_nbytes;
    rig
}

#[test]
fn a_commit_is_found_again_with_counts_and_weights() {
    for (param, is_packed) in PARAMS.into_iter().chain([(ParamKind::Float32WithF16, false)]) {
        let mut rig = kept(param, is_packed, 1 << 20);
        let (swap, engine) = rig.begin();
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
    for (param, is_packed) in PARAMS {
        let mut rig = kept(param, is_packed, 2 << 20);
        rig.config.commit_interval = NonZeroU64::new(3).expect("above 0");
        let (swap, engine) = rig.begin();
        let mut committed = Vec::new();
        for step in 1..=5 {
            assert_eq!(swap.commits_next(), step == 1 || step == 3);
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
    let (swap, engine) = rig.begin();
    rig.step(&engine);
    assert_eq!((swap.weights_behind(), swap.is_behind()), (Vec::new(), false));
    rig.step(&engine);
    assert_eq!((swap.weights_behind(), swap.is_behind()), (vec![0, 1, 2, 3], true));
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
    assert_eq!(swap.volume().step(), Some(1));
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
    let (swap, engine) = rig.begin();
    rig.step(&engine);
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
    assert_eq!(swap.volume().step(), Some(2));
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
    let (swap, engine) = rig.begin();
    rig.step(&engine);
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
        let (swap, engine) = rig.begin();
        let mut written = Vec::new();
        for _ in 0..5 {
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
    assert_eq!([third[1], third[3], third[4]], [none[1], none[3], none[4]]);
    assert_eq!([third[0], third[2]], [every[0], every[2]]);
    assert!(every[2].1 > none[2].1 + 2 * NUMELS[0] as u64);
}

/// One that was resumed may go on in two runs, whose next steps are told apart.
#[test]
fn a_commit_says_which_run_made_it() {
    let mut rig = Rig::of_kind(ParamKind::Split, MomentsKind::Float32, Durability::Commit);
    rig.config.options.keep = true;
    let (swap, engine) = rig.begin();
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
            let (swap, engine) = rig.begin();
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

#[test]
fn another_volume_is_refused_and_stays() {
    let mut rig = kept(ParamKind::Split, false, 0);
    let mut other = Rig::new(vec![split(5, 1)], Durability::Commit);
    drop(rig.create().expect("a swap"));
    other.config = rig.config.clone();
    let error = other.open().expect_err("of others, before its first commit");
    assert!(error.to_string().contains("no committed step, and was made for other"), "{error}");
    let places = rig.places();
    let (swap, found) = Swap::open(&rig.config, &places, &pool_of(2)).expect("a swap");
    assert_eq!((found, swap.volume().step()), (None, None));
    let swap = Arc::new(swap);
    let engine = rig.engine(host_device(&rig.all), &swap);
    rig.step(&engine);
    rig.assert_as_expected(&swap, "a step of one that was left");
    drop((engine, swap));
    rig.config.options.keep = false;
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
    let (swap, engine) = rig.begin();
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
