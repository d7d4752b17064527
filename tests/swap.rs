//! Swaps: steps on a volume have the bits of steps in memory, with as few buffers as can be, and
//! what a drive does wrong ends the engine before anything is uploaded.

mod battery;
mod drives;
mod on_device;
mod swap_rig;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use battery::{Layout, MomentsKind, ParamKind};
use drives::{Call, Effect};
use on_device::{Gated, SOON, STREAM, host_device, take};
use rustix::io::Errno;
use stepwell::{
    device::Device,
    state::chunk::CHUNK_LEN,
    stream::element::Dtype,
    tier::volume::{Durability, EngineKind},
};
use swap_rig::{NUMELS, Rig, failed_step, hyper, of, zero};

/// Of other masters: `tests/volumes/test_offload_volume.py`.
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
            let mut rig = Rig::of_kind(param, moments, durability).packing(is_packed);
            let (swap, engine) = rig.begin();
            for _ in 0..3 {
                rig.step(&engine);
            }
            rig.assert_as_expected(&swap, "three steps");
        }
    }
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
    let (_swap, engine) = rig.begin();
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

/// 17 bits and a checksum in place of 32.
#[test]
fn packed_masters_take_half_of_the_space() {
    let layout = Layout::new(ParamKind::Float32WithBf16, MomentsKind::Q8, Dtype::BFloat16);
    let moved = |is_packed| {
        let mut rig = Rig::new(of(layout), Durability::None).packing(is_packed);
        let (swap, engine) = rig.begin();
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
        let mut rig = Rig::of_kind(ParamKind::Float32WithBf16, MomentsKind::Q8, Durability::Commit)
            .packing(true);
        rig.config.ram_nbytes = ram_nbytes;
        let (swap, engine) = rig.begin();
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
        let mut rig = Rig::of_kind(param, MomentsKind::Float32, Durability::None).packing(true);
        let said = rig.create().expect_err("refused").to_string();
        assert!(said.contains("of tensor `0` is to be packed, expected an fp32"), "{said}");
    }
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
    let (swap, engine) = rig.begin();
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
    let (swap, engine) = rig.begin();
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
    let (_swap, engine) = rig.begin();
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
