//! Jobs and generations: what a step borrows is held until it has ended, what is discarded is never
//! stepped, one generation is filled while another is stepped, and calls do not interleave.

mod battery;
mod on_device;

use std::{
    sync::{
        Arc, Barrier, Condvar, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

use battery::Held;
use on_device::{
    Call, Gated, OnDevice, Resumed, SOON, STREAM, WATCHED, bytes, discard, drain, engine_on,
    engine_with, finish, host_device, lent, split, stepped, submit, take, take_parts, take_these,
    witness,
};
use stepwell::{
    Error, Result,
    adam::{Hyper, tensor::AdamTensor},
    device::{Device, Lane},
    offload::{Engine, SEGMENT_LEN, Shape, Update},
    simd::isa::Isa,
    state::chunk::{CHUNK_LEN, Chunk},
    stream::{
        element::Dtype,
        view::{Route, View},
    },
    tier::{Run, Stored, Tier, ram::Ram},
};

fn count(dropped: &AtomicUsize) -> usize {
    dropped.load(Ordering::SeqCst)
}

/// Another gradient, in memory of its own.
fn negated(grad: &[u8]) -> Vec<u8> {
    let mut negated = grad.to_vec();
    negated.iter_mut().skip(1).step_by(2).for_each(|high| *high ^= 0x80);
    negated
}

fn part_of(source: &[u8], host: View) -> (u64, View) {
    (source.as_ptr().expose_provenance() as u64, host)
}

// ---- discarded ----

/// Takes the gradient of a step that is not taken, then that of the next in parts; whether the step
/// begins without them.
fn steps_an_abandoned_gradient(discards: bool) -> bool {
    let mut all = [split(CHUNK_LEN + 3, 1)];
    let abandoned = all[0].grad.clone();
    all[0].grad = negated(&abandoned);
    let mut expected = stepped(&all[0], 1, &Hyper::default());
    let device = host_device(&all);
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 1);
    let _resumed = Resumed(&device);
    let (_, source, host) = all[0].gradient(0);
    // SAFETY: all memory outlives the step, which is waited for.
    unsafe { take_these(&engine, &[(0, part_of(&abandoned, host).0, host)]) }.expect("a gradient");
    drain(&engine).expect("copies");
    if discards {
        discard(&engine);
    }
    device.pause(Lane::Download, true);
    // SAFETY: as above.
    unsafe { take_parts(&engine, &[(source, host)]) }.expect("a part");
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    let is_early = engine.wait(0, &(0..1), STREAM, WATCHED).expect("a step that works");
    device.pause(Lane::Download, false);
    finish(&engine);
    if !is_early {
        all[0].held.assert_same(&mut expected, "the part");
    }
    is_early
}

#[test]
fn a_discarded_gradient_is_never_stepped() {
    assert!(!steps_an_abandoned_gradient(true), "stepped with a gradient of the step before");
}

#[test]
fn a_part_is_waited_for_also_where_a_whole_gradient_was_taken_before() {
    assert!(!steps_an_abandoned_gradient(false), "stepped without a part that was taken");
}

#[test]
fn discarding_waits_for_the_copies_and_returns_what_was_lent() {
    let mut all = [split(70, 1), split(30, 2)];
    let device = host_device(&all);
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 1);
    let _resumed = Resumed(&device);
    assert_eq!(engine.discard().expect("nothing to discard"), None);
    device.pause(Lane::Download, true);
    // More than the device is given at once: the event behind them is not recorded yet.
    let gradients: Vec<_> = (0..20).map(|_| all[0].gradient(0)).collect();
    let (mut first, dropped) = lent();
    // SAFETY: all memory outlives the copies, which are waited for.
    unsafe {
        for gradient in &gradients {
            assert!(engine.take(&[*gradient], &mut first, STREAM, SOON).expect("a gradient"));
        }
    }
    assert!(first.is_none(), "what is lent is taken");
    let discarded = engine.discard().expect("a device that works").expect("a gradient was taken");
    let is_over = || engine.wait_discarded(discarded, WATCHED).expect("a device that works");
    assert!(!is_over(), "copies are on their way");
    assert_eq!(engine.returned().count(), 0);
    // The one that follows is of another step, and is not discarded by the call that waits on.
    let (mut second, kept) = lent();
    // SAFETY: as above.
    unsafe { engine.take(&[all[1].gradient(1)], &mut second, STREAM, SOON) }.expect("a gradient");
    device.pause(Lane::Download, false);
    submit(&engine, &mut all[1..], 1, Hyper::default()).expect_err("tensor 0 has another size");
    drain(&engine).expect("copies");
    engine.returned().for_each(drop);
    assert_eq!([&dropped, &kept].map(|both| [count(&both[0]), count(&both[1])]), [[1; 2]; 2]);
}

/// A wait for a discard ended before the copies had, by Ctrl-C for one.
#[test]
fn what_is_taken_after_a_discard_that_was_not_waited_for_is_stepped() {
    let mut all = [split(70, 1)];
    let abandoned = all[0].grad.clone();
    all[0].grad = negated(&abandoned);
    let mut expected = stepped(&all[0], 1, &Hyper::default());
    let device = host_device(&all);
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 1);
    let _resumed = Resumed(&device);
    let (_, source, host) = all[0].gradient(0);
    device.pause(Lane::Download, true);
    // More than the device is given at once: the event behind them is not recorded yet.
    for _ in 0..20 {
        // SAFETY: all memory outlives the copies, which are waited for.
        unsafe { take_these(&engine, &[(0, part_of(&abandoned, host).0, host)]) }.expect("one");
    }
    let discarded = engine.discard().expect("a device that works").expect("gradients were taken");
    assert!(!engine.wait_discarded(discarded, WATCHED).expect("copies are on their way"));
    assert_eq!(engine.discard().expect("a device that works"), Some(discarded), "still the same");
    let (mut borrowed, dropped) = lent();
    // SAFETY: as above.
    unsafe { engine.take(&[(0, source, host)], &mut borrowed, STREAM, SOON) }.expect("a gradient");
    device.pause(Lane::Download, false);
    // The wait that goes on is for the old copies, and returns nothing of the new ones.
    assert!(engine.wait_discarded(discarded, SOON).expect("copies"));
    engine.returned().for_each(drop);
    assert_eq!([&*dropped[0], &*dropped[1]].map(count), [0; 2]);
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    assert_eq!(engine.discard().expect("a device that works"), None, "its memory is the step's");
    finish(&engine);
    all[0].held.assert_same(&mut expected, "the gradient that was taken last");
    engine.returned().for_each(drop);
    assert_eq!([&*dropped[0], &*dropped[1]].map(count), [1; 2]);
}

#[test]
fn a_tensor_twice_in_a_call_is_refused_and_nothing_is_queued() {
    let mut all = [split(70, 1), split(30, 2)];
    let engine = engine_on(host_device(&all), &all, 1);
    let (one, other) = (all[0].gradient(0), all[1].gradient(1));
    // SAFETY: it is refused.
    let refused = unsafe { take_these(&engine, &[one, other, one]) }.expect_err("twice");
    assert!(refused.to_string().contains("tensor `0` stands twice"), "{refused}");
    assert_eq!(engine.discard().expect("a device that works"), None);
}

#[test]
fn a_step_reads_its_gradients_as_what_they_were_taken() {
    let mut all = [split(70, 1)];
    let engine = engine_on(host_device(&all), &all, 1);
    let (_, source, host) = all[0].gradient(0);
    let other = View::new(host.address(), Dtype::Float16, host.numel()).expect("a view");
    // SAFETY: all memory outlives the copies, which are waited for.
    unsafe { take_these(&engine, &[(0, source, other)]) }.expect("a gradient");
    let message = submit(&engine, &mut all, 1, Hyper::default()).expect_err("another dtype");
    assert!(message.to_string().contains("memory and dtype"), "{message}");
    discard(&engine);
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
fn what_was_discarded_leaves_no_bytes_behind() {
    let mut all = [split(70, 1)];
    let engine = engine_on(host_device(&all), &all, 1);
    for _ in 0..3 {
        take(&engine, &mut all).expect("a gradient");
        discard(&engine);
    }
    take(&engine, &mut all).expect("a gradient");
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    finish(&engine);
    assert_eq!(engine.timing().bytes_downloaded, 140);
}

#[test]
fn a_step_reads_its_gradients_where_they_were_taken_to() {
    let mut all = [split(70, 1)];
    let engine = engine_on(host_device(&all), &all, 1);
    let mut elsewhere = vec![0_u16; 70];
    let (_, source, host) = all[0].gradient(0);
    let other = View::new(elsewhere.as_mut_ptr().expose_provenance(), host.dtype(), 70);
    // SAFETY: all memory outlives the step, which is waited for.
    unsafe { take_these(&engine, &[(0, source, other.expect("a view"))]) }.expect("a gradient");
    let message = submit(&engine, &mut all, 1, Hyper::default()).expect_err("elsewhere");
    assert!(message.to_string().contains("was taken to"), "{message}");
    discard(&engine);
    take(&engine, &mut all).expect("a gradient");
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    finish(&engine);
}

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
fn releasing_returns_the_device_side_and_the_host_side_stays() {
    let mut all = [split(CHUNK_LEN, 1)];
    let device = Arc::new(Gated::new(&all));
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 1);
    let _resumed = Resumed(&device.host);
    device.streams_wait.store(false, Ordering::Relaxed);
    device.host.pause(Lane::Download, true);
    let (mut borrowed, [sources, targets]) = lent();
    // SAFETY: all memory outlives the step, which is waited for.
    unsafe { engine.take(&[all[0].gradient(0)], &mut borrowed, STREAM, SOON) }.expect("a gradient");
    engine.returned().for_each(drop);
    assert_eq!([&*sources, &*targets].map(count), [0, 0]);
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    assert!(engine.release(STREAM, SOON).expect("the device has all copies"));
    engine.returned().for_each(drop);
    assert_eq!([&*sources, &*targets].map(count), [1, 0], "the stream is ordered after the copy");
    device.host.pause(Lane::Download, false);
    finish(&engine);
    engine.returned().for_each(drop);
    assert_eq!([&*sources, &*targets].map(count), [1, 1]);
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

// ---- tiers ----

/// Keeps state in the tensors, as [`Ram`], but may hold fetches back, and may make what is stored
/// final with the commit only. It logs what is asked of it.
#[derive(Default)]
struct Watched {
    commits_late: bool,
    is_held: Mutex<bool>,
    changed: Condvar,
    is_commit_held: AtomicBool,
    asked: Mutex<Vec<Asked>>,
}

#[derive(Clone, Debug, PartialEq)]
enum Asked {
    Fetch(Run),
    Route(Chunk),
    Store(Run),
    Commit,
}

impl Watched {
    fn hold(&self, held: bool) {
        *self.is_held.lock().expect("no panic") = held;
        self.changed.notify_all();
    }

    fn log(&self, asked: Asked) {
        self.asked.lock().expect("no panic").push(asked);
    }

    fn wait(&self) -> Result<()> {
        let held = self.is_held.lock().expect("no panic");
        let (held, _) =
            self.changed.wait_timeout_while(held, SOON, |held| *held).expect("no panic");
        if *held { Err(Error::value("the test has not let the tier go on")) } else { Ok(()) }
    }
}

// SAFETY: it routes as `Ram`.
unsafe impl Tier for Watched {
    fn fetch(&self, run: &Run) -> Result<()> {
        self.log(Asked::Fetch(run.clone()));
        if !self.is_commit_held.load(Ordering::Relaxed) { self.wait() } else { Ok(()) }
    }

    fn route(&self, tensor: &AdamTensor, chunk: Chunk) -> AdamTensor<Route> {
        self.log(Asked::Route(chunk));
        Ram.route(tensor, chunk)
    }

    fn store(&self, run: &Run) -> Result<Stored> {
        self.log(Asked::Store(run.clone()));
        Ok(if self.commits_late { Stored::WithCommit } else { Stored::Final })
    }

    fn commit(&self) -> Result<()> {
        self.log(Asked::Commit);
        self.wait()
    }
}

#[test]
fn a_tier_is_asked_for_each_run_in_order_and_once_for_the_commit() {
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
    let mut sequence = Vec::new();
    for (tensor, chunks) in runs {
        let run = Run { tensor, chunks: chunks.clone() };
        sequence.push(Asked::Fetch(run.clone()));
        sequence.extend(chunks.map(|index| Asked::Route(Chunk { tensor, index })));
        sequence.push(Asked::Store(run));
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
    let tier = Arc::new(Watched { commits_late: true, ..Watched::default() });
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

// ---- two generations ----

#[test]
fn one_generation_is_filled_while_the_other_is_stepped() {
    let mut all = [split(CHUNK_LEN + 5, 1), split(9, 2)];
    let hyper = Hyper::default();
    let mut expected: Vec<Held> = all.iter().map(|one| stepped(one, 1, &hyper)).collect();
    let tier = Arc::new(Watched::default());
    let engine = engine_with(host_device(&all), &all, 2, Arc::clone(&tier) as Arc<dyn Tier>, 2);
    tier.hold(true);
    take(&engine, &mut all).expect("gradients");
    submit(&engine, &mut all, 1, hyper).expect("a step");

    // The second generation: other memory on both sides.
    let seconds: Vec<Vec<u8>> = all.iter().map(|one| negated(&one.grad)).collect();
    let mut hosts: Vec<Vec<u16>> = all.iter().map(|one| vec![0; one.held.numel]).collect();
    let mut gradients = Vec::new();
    for (index, (source, host)) in seconds.iter().zip(&mut hosts).enumerate() {
        let dtype = all[index].held.tensor().grad.expect("a gradient").dtype();
        let host = View::new(host.as_mut_ptr().expose_provenance(), dtype, host.len());
        gradients.push((index, source.as_ptr().expose_provenance() as u64, host.expect("a view")));
    }
    // SAFETY: all memory outlives the steps, which are waited for.
    unsafe { take_these(&engine, &gradients) }.expect("the other generation is free");
    for (&(_, _, host), source) in gradients.iter().zip(&seconds) {
        wait_until(|| bytes(host) == *source);
    }
    assert!(engine.is_busy(), "the first step is held");
    let refused = submit(&engine, &mut all, 2, hyper).expect_err("one step at a time");
    assert!(refused.to_string().contains("still running"), "{refused}");
    tier.hold(false);
    finish(&engine);
    for (one, expected) in all.iter_mut().zip(&mut expected) {
        one.held.assert_same(expected, "the first generation");
    }

    for (one, second) in all.iter_mut().zip(&seconds) {
        one.grad.clone_from(second);
    }
    let mut expected: Vec<Held> = all.iter().map(|one| stepped(one, 2, &hyper)).collect();
    let update = |index: usize| {
        let mut update = all[index].update(index, 2, hyper);
        update.tensor.grad = Some(gradients[index].2);
        update
    };
    let updates: Vec<_> = (0..gradients.len()).map(update).collect();
    // SAFETY: as above.
    unsafe { engine.submit(&updates, &mut None, STREAM) }.expect("a step");
    finish(&engine);
    for (one, expected) in all.iter_mut().zip(&mut expected) {
        one.held.set_grad(|_| 0.0);
        expected.set_grad(|_| 0.0);
        one.held.assert_same(expected, "the second generation");
        one.assert_uploaded();
    }
}

/// A wait for a discard ended early, and the other generation is discarded after it.
#[test]
fn waiting_for_a_discard_returns_what_both_generations_had_discarded_before() {
    let mut all = [split(70, 1)];
    let tier = Arc::new(Watched::default());
    let engine = engine_with(host_device(&all), &all, 2, Arc::clone(&tier) as Arc<dyn Tier>, 2);
    tier.hold(true);
    take(&engine, &mut all).expect("gradients");
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    let mut other = vec![0_u16; 70];
    let (_, source, host) = all[0].gradient(0);
    let there = View::new(other.as_mut_ptr().expose_provenance(), host.dtype(), 70);
    let there = there.expect("a view");
    let take_lent = |target: View| {
        let (mut lent, dropped) = lent();
        // SAFETY: all memory outlives the engine.
        unsafe { engine.take(&[(0, source, target)], &mut lent, STREAM, SOON) }.expect("one");
        dropped
    };
    let discard = || engine.discard().expect("a device").expect("a gradient was taken");
    let counts = |dropped: [&[Arc<AtomicUsize>; 2]; 2]| {
        engine.returned().for_each(drop);
        dropped.map(|both| [count(&both[0]), count(&both[1])])
    };
    let seconds = take_lent(there);
    let second = discard();
    tier.hold(false);
    assert!(engine.finish(STREAM, SOON).expect("a step that works"));
    let firsts = take_lent(host);
    let first = discard();
    assert_ne!(first, second);
    // The earlier discard is waited for, and nothing of the later one comes back.
    assert!(engine.wait_discarded(second, SOON).expect("copies"));
    assert_eq!(counts([&firsts, &seconds]), [[0; 2], [1; 2]]);
    assert_eq!(engine.discard().expect("a device"), Some(first), "it is still to be waited for");
    assert!(engine.wait_discarded(first, SOON).expect("copies"));
    assert_eq!(counts([&firsts, &seconds]), [[1; 2], [1; 2]]);

    // The same, and the later discard alone is waited for.
    tier.hold(true);
    submit(&engine, &mut all, 2, Hyper::default()).expect("a step");
    let seconds = take_lent(there);
    discard();
    tier.hold(false);
    assert!(engine.finish(STREAM, SOON).expect("a step that works"));
    let firsts = take_lent(host);
    assert!(engine.wait_discarded(discard(), SOON).expect("copies"));
    assert_eq!(counts([&firsts, &seconds]), [[1; 2], [1; 2]]);
    assert_eq!(engine.discard().expect("a device"), None);
}

#[test]
fn the_only_generation_is_not_filled_while_it_is_stepped() {
    let mut all = [split(70, 1)];
    let device = host_device(&all);
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 1);
    let _resumed = Resumed(&device);
    device.pause(Lane::Download, true);
    take(&engine, &mut all).expect("a gradient");
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    let refused = take(&engine, &mut all).expect_err("it is read").to_string();
    assert!(refused.contains("one generation") && refused.contains("hint"), "{refused}");
    // There is nothing to discard, and the step is not disturbed.
    assert_eq!(engine.discard().expect("nothing"), None);
    let mut expected = stepped(&all[0], 1, &Hyper::default());
    device.pause(Lane::Download, false);
    finish(&engine);
    all[0].held.assert_same(&mut expected, "the step");
}

#[test]
fn no_or_many_generations_are_refused() {
    for generations in [0, 3] {
        let shape = Shape { numels: &[1], generations };
        let Err(error) = Engine::new("cpu", shape, battery::pool_of(1), Isa::SCALAR) else {
            panic!("`{generations}` were taken")
        };
        assert!(error.to_string().contains(&format!("`{generations}`")), "{error}");
    }
}

/// Waits for what another thread does.
fn wait_until(is_there: impl Fn() -> bool) {
    let begin = std::time::Instant::now();
    while !is_there() {
        assert!(begin.elapsed() < SOON, "it does not come");
        thread::yield_now();
    }
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

// ---- bounds ----

#[test]
fn a_full_queue_takes_a_call_whole_or_not_at_all() {
    let mut all = [split(30, 1)];
    let device = host_device(&all);
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 1);
    let _resumed = Resumed(&device);
    device.pause(Lane::Download, true);
    let gradient = all[0].gradient(0);
    let mut taken = 0;
    let (mut last, dropped) = lent();
    // SAFETY: all memory outlives the copies, which are waited for.
    unsafe {
        while engine.take(&[gradient], &mut None, STREAM, WATCHED).expect("a device") {
            taken += 1;
            assert!(taken < 10_000, "the queue is not bounded");
        }
        assert!(!engine.take(&[gradient], &mut last, STREAM, WATCHED).expect("a device"));
    }
    assert!(taken > 20 && last.is_some(), "what is not queued is not taken");
    // What is announced can still be stepped, or discarded.
    let discarded = engine.discard().expect("a device").expect("a gradient was taken");
    assert!(!engine.wait_discarded(discarded, WATCHED).expect("copies are on their way"));
    device.pause(Lane::Download, false);
    discard(&engine);
    // SAFETY: as above.
    assert!(unsafe { engine.take(&[gradient], &mut last, STREAM, SOON) }.expect("room"));
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    finish(&engine);
    engine.returned().for_each(drop);
    assert_eq!([&*dropped[0], &*dropped[1]].map(count), [1, 1]);
}

#[test]
fn more_copies_than_the_queue_has_places_are_refused() {
    let mut all = [split(30, 1)];
    let engine = engine_on(host_device(&all), &all, 1);
    let (_, source, host) = all[0].gradient(0);
    // SAFETY: it is refused.
    let refused = unsafe { take_parts(&engine, &vec![(source, host); 10_000]) };
    let message = refused.expect_err("too many").to_string();
    assert!(message.contains("`10003` copies") && message.contains("hint"), "{message}");
    drain(&engine).expect("nothing to wait for");
}
