//! Jobs: what a step borrows is held until it has ended, tiers are asked in order, and calls of two
//! threads do not interleave.

mod battery;
mod forked;
mod on_device;

use std::{
    sync::{Arc, Barrier, atomic::Ordering},
    thread,
};

use battery::Held;
use forked::in_forked_child;
use on_device::{
    Call, Gated, OnDevice, Resumed, SOON, STREAM, WATCHED, bytes, count, discard, drain, engine_on,
    engine_with, finish, host_device, lent, negated, split, stepped, submit, take, take_parts,
    take_these,
    tier::{Asked, Watched},
    witness,
};
use stepwell::{
    Result,
    adam::Hyper,
    device::{Device, Lane},
    offload::{SEGMENT_LEN, Timing, Update},
    state::chunk::{CHUNK_LEN, Chunk},
    stream::{element::Dtype, view::View},
    tier::Tier,
};

// ---- what is lent ----

#[test]
fn what_a_step_borrows_is_held_until_its_last_upload_has_ended() {
    let mut all = [split(CHUNK_LEN, 1)];
    let device = Arc::new(Gated::new(&all));
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 1);
    let _resumed = Resumed(&device.host);
    device.streams_wait.store(false, Ordering::Relaxed);
    device.host.pause(Lane::Upload, true);
    let (mut borrowed, [sources, targets]) = lent();
    let (owners, dropped) = witness();
    let gradient = all[0].gradient(0);
    // SAFETY: all memory outlives the step, which is waited for.
    unsafe {
        assert!(engine.take(&[gradient], &mut borrowed, STREAM, SOON).expect("a gradient"));
        let updates = vec![all[0].update(0, 1, Hyper::default())];
        let mut owners = Some(owners);
        engine.submit(&updates, &mut owners, STREAM).expect("a step");
        assert!(owners.is_none(), "what is lent is taken");
    }
    assert!(engine.finish(STREAM, SOON).expect("a step that works"));
    engine.returned().for_each(drop);
    assert_eq!([&*sources, &*targets, &*dropped].map(count), [1, 1, 0], "the upload has not ended");
    assert!(all[0].weight.iter().all(|&byte| byte == 0xa5));
    device.host.pause(Lane::Upload, false);
    drain(&engine).expect("copies");
    assert_eq!(count(&dropped), 0, "dropped by a thread of the engine's");
    engine.returned().for_each(drop);
    assert_eq!(count(&dropped), 1);
    all[0].assert_uploaded();
}

#[test]
fn what_is_refused_takes_nothing() {
    let mut all = [split(70, 1)];
    let engine = engine_on(host_device(&all), &all, 1);
    let (mut borrowed, [sources, _]) = lent();
    let (owners, dropped) = witness();
    let mut owners = Some(owners);
    let (index, source, host) = all[0].gradient(0);
    // SAFETY: both are refused.
    unsafe {
        engine
            .take(&[(index + 1, source, host)], &mut borrowed, STREAM, SOON)
            .expect_err("no such");
        let updates = vec![all[0].update(0, 0, Hyper::default())];
        engine.submit(&updates, &mut owners, STREAM).expect_err("no such count");
    }
    assert!(borrowed.is_some() && owners.is_some());
    assert_eq!([&*sources, &*dropped].map(count), [0, 0]);
}

/// The views of a tensor can be replaced after they were checked.
#[test]
fn views_that_do_not_fit_the_tensor_are_refused() {
    let mut all = [split(70, 1)];
    let engine = engine_on(host_device(&all), &all, 1);
    let hyper = Hyper::default();
    let update = all[0].update(0, 1, hyper);
    let grad = update.tensor.grad.expect("a gradient");
    let spoil: [fn(&mut Update, View); 4] = [
        |update, grad| update.tensor.grad = Some(grad.part(0..69)),
        |update, grad| update.tensor.weight_out = Some(grad),
        |update, grad| update.tensor.param = grad.part(0..69),
        |update, grad| {
            let wide = View::new(grad.address(), Dtype::Float32, 70);
            update.tensor.param = wide.expect("a view");
        },
    ];
    for spoil in spoil {
        let mut spoilt = update;
        spoil(&mut spoilt, grad);
        // SAFETY: it is refused.
        unsafe { engine.submit(&[spoilt], &mut None, STREAM) }.expect_err("must be refused");
    }
    assert!(!engine.is_busy());
}

#[test]
fn a_failed_step_keeps_what_it_has_borrowed() {
    let mut all = [split(70, 1)];
    let device = Arc::new(Gated::new(&all));
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 1);
    device.uploads_fail.store(true, Ordering::Relaxed);
    take(&engine, &mut all).expect("a gradient");
    let (owners, dropped) = witness();
    let updates = vec![all[0].update(0, 1, Hyper::default())];
    // SAFETY: all memory outlives the engine.
    unsafe { engine.submit(&updates, &mut Some(owners), STREAM) }.expect("a step");
    engine.finish(STREAM, SOON).expect_err("must fail");
    engine.returned().for_each(drop);
    assert_eq!(count(&dropped), 0, "what the device still does with it is not known");
    drop(engine);
    assert_eq!(count(&dropped), 1);
}

#[test]
fn dropping_the_engine_drops_what_is_lent_after_all_copies() {
    let mut all = [split(70, 1)];
    let device = host_device(&all);
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 1);
    let _resumed = Resumed(&device);
    let (mut borrowed, [sources, targets]) = lent();
    let (owners, dropped) = witness();
    // SAFETY: all memory outlives the step, which dropping waits for.
    unsafe {
        engine.take(&[all[0].gradient(0)], &mut borrowed, STREAM, SOON).expect("a gradient");
        let updates = vec![all[0].update(0, 1, Hyper::default())];
        engine.submit(&updates, &mut Some(owners), STREAM).expect("a step");
    }
    drop(engine);
    assert_eq!([&*sources, &*targets, &*dropped].map(count), [1, 1, 1]);
    all[0].assert_uploaded();
}

/// The caller may end an engine where it holds no lock that the engine's threads take.
#[test]
fn an_engine_ends_once_and_keeps_what_was_lent_until_it_is_dropped() {
    let mut all = [split(70, 1)];
    let mut expected = stepped(&all[0], 1, &Hyper::default());
    let engine = engine_on(host_device(&all), &all, 1);
    let (mut borrowed, dropped) = lent();
    // SAFETY: all memory outlives the engine.
    unsafe { engine.take(&[all[0].gradient(0)], &mut borrowed, STREAM, SOON) }.expect("a gradient");
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    engine.end();
    assert!(!engine.is_busy(), "it waits for the step");
    assert_eq!([&*dropped[0], &*dropped[1]].map(count), [0; 2]);
    engine.end();
    drop(engine);
    assert_eq!([&*dropped[0], &*dropped[1]].map(count), [1; 2]);
    all[0].held.assert_same(&mut expected, "the step");
    all[0].assert_uploaded();
}

#[test]
fn what_is_pinned_is_unpinned_when_the_engine_ends() {
    let all = [split(70, 1)];
    let device = Arc::new(Gated::new(&all));
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 2);
    assert_eq!(engine.threads(), 2);
    let memory = [vec![0_u8; 4096], vec![0_u8; 4096]];
    let addresses = memory.each_ref().map(|one| one.as_ptr().expose_provenance());
    for address in addresses {
        // SAFETY: the memory outlives the engine.
        unsafe { engine.pin(address, 4096) }.expect("a device that works");
    }
    assert_eq!(*device.pinned.lock().expect("no panic"), addresses);
    assert_eq!(engine.pinned_nbytes(), 2 * 4096);
    engine.end();
    assert_eq!(engine.pinned_nbytes(), 0);
    assert!(device.pinned.lock().expect("no panic").is_empty());
}

// ---- forked ----

/// The engine's threads and locks are the parent's.
#[test]
fn a_forked_child_is_refused_and_waits_for_nothing() {
    let mut all = [split(70, 1)];
    let mut expected = stepped(&all[0], 1, &Hyper::default());
    let tier = Arc::new(Watched::default());
    tier.is_commit_held.store(true, Ordering::Relaxed);
    tier.hold(true);
    let engine = engine_with(host_device(&all), &all, 1, Arc::clone(&tier) as Arc<dyn Tier>, 1);
    let (mut borrowed, dropped) = lent();
    // SAFETY: all memory outlives the step, which is waited for.
    unsafe { engine.take(&[all[0].gradient(0)], &mut borrowed, STREAM, SOON) }.expect("a gradient");
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    let (_, source, host) = all[0].gradient(0);
    let mut slot = Some(engine);
    in_forked_child(|| {
        let Some(engine) = slot.as_ref() else { return false };
        let said: [Result<bool>; 8] = [
            take(engine, &mut all).map(|()| true),
            // SAFETY: it is refused.
            unsafe { take_parts(engine, &[(source, host)]) }.map(|()| true),
            submit(engine, &mut all, 2, Hyper::default()).map(|()| true),
            engine.discard().map(|_| true),
            engine.wait(0, &(0..70), STREAM, SOON),
            engine.finish(STREAM, SOON),
            engine.release(STREAM, SOON),
            engine.drain(SOON),
        ];
        let is_refused = |said: &Result<bool>| {
            said.as_ref().is_err_and(|error| error.to_string().contains("belongs to process"))
        };
        let is_quiet = !engine.is_busy()
            && engine.timing() == Timing::default()
            && engine.returned().count() == 0;
        drop(slot.take());
        said.iter().all(is_refused) && is_quiet && count(&dropped[0]) == 0
    });
    let engine = slot.expect("the child's is a copy");
    assert!(engine.is_busy());
    tier.hold(false);
    finish(&engine);
    all[0].held.assert_same(&mut expected, "the parent's step");
    engine.returned().for_each(drop);
    assert_eq!(count(&dropped[0]), 1);
    assert_ne!(engine.timing(), Timing::default());
}

// ---- tiers ----

#[test]
fn a_tier_is_asked_for_each_chunk_in_order_and_once_for_the_commit() {
    let mut all = [split(SEGMENT_LEN + CHUNK_LEN + 5, 1), split(9, 2)];
    let mut expected: Vec<Held> =
        all.iter().map(|one| stepped(one, 1, &Hyper::default())).collect();
    let tier = Arc::new(Watched::default());
    // One worker: then all of it is one sequence.
    let engine = engine_with(host_device(&all), &all, 1, Arc::clone(&tier) as Arc<dyn Tier>, 1);
    take(&engine, &mut all).expect("gradients");
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    finish(&engine);
    let segment = SEGMENT_LEN / CHUNK_LEN;
    let runs = [(0, 0..segment), (0, segment..segment + 2), (1, 0..1)];
    let mut sequence = vec![Asked::Begin(runs.to_vec())];
    for (tensor, chunks) in runs {
        for chunk in chunks.map(|index| Chunk { tensor, index }) {
            sequence.extend([Asked::Fetch(chunk), Asked::Store(chunk)]);
        }
    }
    sequence.push(Asked::Commit);
    assert_eq!(*tier.asked.lock().expect("no panic"), sequence);
    for (one, expected) in all.iter_mut().zip(&mut expected) {
        one.held.assert_same(expected, "a tier");
        one.assert_uploaded();
    }
}

#[test]
fn a_tier_that_can_fail_commits_before_anything_is_uploaded() {
    let mut all = [split(CHUNK_LEN + 5, 1), split(9, 2)];
    let device = Arc::new(Gated::new(&all));
    let tier = Arc::new(Watched::committing_late());
    tier.is_commit_held.store(true, Ordering::Relaxed);
    tier.hold(true);
    let engine = engine_with(
        Arc::clone(&device) as Arc<dyn Device>,
        &all,
        1,
        Arc::clone(&tier) as Arc<dyn Tier>,
        2,
    );
    take(&engine, &mut all).expect("gradients");
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    assert!(!engine.wait(1, &(0..9), STREAM, WATCHED).expect("a step that works"));
    assert!(engine.is_busy());
    let is_upload = |call: &Call| matches!(call, Call::Copy(Lane::Upload, _));
    let uploads =
        || device.calls.lock().expect("no panic").iter().filter(|call| is_upload(&call.1)).count();
    assert_eq!(uploads(), 0, "uploaded before the commit");
    tier.hold(false);
    finish(&engine);
    assert_eq!(uploads(), 2);
    all.iter_mut().for_each(OnDevice::assert_uploaded);
}

// ---- threads ----

#[test]
fn a_take_and_a_submit_do_not_interleave() {
    let mut all: Vec<OnDevice> = (0..6).map(|seed| split(40 + seed as usize, seed)).collect();
    let device = host_device(&all);
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 2);
    let _resumed = Resumed(&device);
    let hyper = Hyper { lr: 0.5, ..Hyper::default() };
    let (mut before, mut after) = (0, 0);
    for step in 1..=200 {
        for one in &mut all {
            one.grad = negated(&one.grad);
            one.held.set_grad(|_| 0.0);
        }
        let mut with: Vec<Held> = all.iter().map(|one| stepped(one, step, &hyper)).collect();
        let mut without: Vec<Held> = all
            .iter()
            .map(|one| {
                let zeros = OnDevice {
                    held: one.held.moved(0),
                    weight: Vec::new(),
                    grad: vec![0; one.grad.len()],
                };
                stepped(&zeros, step, &hyper)
            })
            .collect();
        let gradients: Vec<_> =
            all.iter_mut().enumerate().map(|(index, one)| one.gradient(index)).collect();
        let updates: Vec<_> =
            all.iter_mut().enumerate().map(|(index, one)| one.update(index, step, hyper)).collect();
        device.pause(Lane::Download, true);
        let barrier = Barrier::new(2);
        let is_taken = thread::scope(|scope| {
            let taking = scope.spawn(|| {
                barrier.wait();
                // SAFETY: all memory outlives the step, which is waited for.
                unsafe { take_these(&engine, &gradients) }.is_ok()
            });
            barrier.wait();
            // SAFETY: as above.
            unsafe { engine.submit(&updates, &mut None, STREAM) }.expect("a step");
            taking.join().expect("no panic")
        });
        device.pause(Lane::Download, false);
        finish(&engine);
        *(if is_taken { &mut before } else { &mut after }) += 1;
        // Taken before, it is all of the step; after, it was refused, or came when the step was
        // over.
        let matches = |expected: &mut [Held]| {
            all.iter_mut().zip(expected).all(|(one, expected)| {
                bytes(one.held.tensor().weight()) == bytes(expected.tensor().weight())
            })
        };
        let mut matches = matches;
        assert!(
            matches(&mut with) || matches(&mut without),
            "step {step}: half of the gradients (taken: {is_taken})"
        );
        discard(&engine);
    }
    assert_eq!(before + after, 200);
}

#[test]
fn threads_find_the_device_that_they_had_set() {
    let mut all = [split(CHUNK_LEN + 5, 1)];
    let device = Arc::new(Gated::new(&all));
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 2);
    let depth = || {
        let depths = device.depths.lock().expect("no panic");
        depths.get(&thread::current().id()).copied().unwrap_or_default()
    };
    for step in 1..=2 {
        take(&engine, &mut all).expect("a gradient");
        assert_eq!(depth(), 0, "take");
        submit(&engine, &mut all, step, Hyper::default()).expect("a step");
        assert_eq!(depth(), 0, "submit");
        assert!(engine.release(STREAM, SOON).expect("a device that works"));
        assert!(engine.wait(0, &(0..9), STREAM, SOON).expect("a step that works"));
        assert_eq!(depth(), 0, "release and wait");
        finish(&engine);
        discard(&engine);
        assert_eq!(depth(), 0, "finish, drain and discard");
    }
    submit(&engine, &mut [], 3, Hyper::default()).expect("an empty step");
    finish(&engine);
    drop(engine);
    assert!(device.depths.lock().expect("no panic").values().all(|&depth| depth == 0));
}
