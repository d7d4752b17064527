//! Deferred steps of the engine: every gradient is applied once, with the coefficients of its own
//! step, at most as late as stated, and what lands is whole.

mod battery;
mod on_device;

use std::sync::{Arc, atomic::Ordering};

use battery::{Draw, Guarded, Held, Layout, MomentsKind, ParamKind, Spread, pool_of, widest};
use on_device::{
    Call, Gated, OnDevice, Resumed, SOON, STREAM, WATCHED, bytes, drain, finish, numels, witness,
};
use stepwell::{
    Error,
    adam::{Hyper, tensor::AdamTensor},
    device::{Device, Lane, host::HostDevice},
    offload::{
        Deferral, Engine, LANDINGS_IN_FLIGHT_MAX, Owners, SEGMENT_LEN, Shape, Update,
        deferral_nbytes,
    },
    state::chunk::CHUNK_LEN,
    stream::{element::Dtype, view::View},
    tier::ram::Ram,
};

/// Tensors of several segments, of a part of one, and of nothing.
fn tensors(moments: MomentsKind) -> Vec<OnDevice> {
    let kinds = [
        (ParamKind::Split, Dtype::BFloat16, SEGMENT_LEN + CHUNK_LEN + 5),
        (ParamKind::Float32, Dtype::Float32, CHUNK_LEN - 1),
        (ParamKind::Shadowed, Dtype::Float16, 2 * CHUNK_LEN + 1),
        (ParamKind::Split, Dtype::BFloat16, 0),
        (ParamKind::Float32WithBf16, Dtype::BFloat16, 3),
        (ParamKind::Split, Dtype::BFloat16, 77),
    ];
    let one = |(seed, (param, grad, numel)): (usize, (ParamKind, Dtype, usize))| {
        let layout = Layout::new(param, moments, grad);
        let mut held = Held::random(layout, numel, 0, Spread::Ordinary, seed as u64);
        held.key = seed as u64;
        OnDevice::new(held)
    };
    kinds.into_iter().enumerate().map(one).collect()
}

/// An engine for deferred steps, with its memory.
struct Deferred {
    engine: Engine,
    // After the engine, which uses them.
    gradients: Guarded,
    _predicted: Guarded,
}

fn dtypes(all: &mut [OnDevice]) -> Vec<Dtype> {
    all.iter_mut().map(|one| one.held.tensor().weight().dtype()).collect()
}

fn deferred_on(
    device: impl FnOnce(usize) -> Arc<dyn Device>,
    all: &mut [OnDevice],
    interval: usize,
) -> Deferred {
    deferred_with(device, all, interval, true)
}

/// An engine with an interval of 1 on a device whose lanes can be paused.
fn gated(all: &mut [OnDevice]) -> (Arc<Gated>, Deferred) {
    let gated = Arc::new(Gated::new(all));
    let device = Arc::clone(&gated) as Arc<dyn Device>;
    (gated, deferred_on(|_| device, all, 1))
}

fn deferred_with(
    device: impl FnOnce(usize) -> Arc<dyn Device>,
    all: &mut [OnDevice],
    interval: usize,
    predicts: bool,
) -> Deferred {
    let (numels, dtypes) = (numels(all), dtypes(all));
    let (of_gradients, of_predicted) =
        deferral_nbytes(&numels, &dtypes, interval).expect("an interval");
    let mut gradients = Guarded::zeros(Dtype::Uint8, of_gradients, 0);
    let mut predicted = Guarded::zeros(Dtype::Uint8, of_predicted, 0);
    let deferral = Deferral {
        interval,
        dtypes: &dtypes,
        gradients: gradients.view(),
        predicted: predicts.then(|| predicted.view()),
        selection: None,
    };
    let shape = Shape { numels: &numels, generations: 2, deferral: Some(deferral) };
    let device = device(Engine::events(shape));
    let engine = Engine::on(device, shape, Arc::new(Ram), pool_of(3), widest()).expect("an engine");
    Deferred { engine, gradients, _predicted: predicted }
}

fn host(events: usize) -> Arc<dyn Device> {
    Arc::new(HostDevice::new(events).expect("a device"))
}

/// New gradients, on the device and of the oracle.
fn draw(all: &mut [OnDevice], expected: &mut [Held], seed: u64) {
    for (index, (one, expected)) in all.iter_mut().zip(expected).enumerate() {
        let mut draw = Draw::new(seed << 8 | index as u64);
        let values: [f32; 251] = std::array::from_fn(|_| draw.normal() as f32);
        // Chunks and segments are no multiples of it: a gradient in a wrong place is another.
        expected.set_grad(|at| values[at % values.len()]);
        one.grad = bytes(expected.grad.view());
    }
}

fn take(engine: &Engine, all: &[OnDevice], which: impl Fn(usize) -> bool) -> Result<(), Error> {
    let source = |one: &OnDevice| one.grad.as_ptr().expose_provenance() as u64;
    let gradients: Vec<_> = all
        .iter()
        .enumerate()
        .filter(|(index, _)| which(*index))
        .map(|(index, one)| (index, source(one)))
        .collect();
    // SAFETY: the tensors outlive the engine.
    let queued = unsafe { engine.take_deferred(&gradients, &mut None, STREAM, SOON) }?;
    assert!(queued, "there is no room");
    Ok(())
}

/// Its gradient is the engine's.
fn without_grad(mut tensor: AdamTensor) -> AdamTensor {
    tensor.grad = None;
    tensor
}

fn updates(
    all: &mut [OnDevice],
    count: impl Fn(usize) -> u64,
    hyper: Hyper,
    which: impl Fn(usize) -> bool,
) -> Vec<Update> {
    let update = |(index, one): (usize, &mut OnDevice)| {
        let update = one.update(index, count(index), hyper);
        Update { tensor: without_grad(update.tensor), ..update }
    };
    all.iter_mut().enumerate().filter(|(index, _)| which(*index)).map(update).collect()
}

fn submit(engine: &Engine, updates: &[Update], predicted: Option<f32>) -> Result<(), Error> {
    // SAFETY: the tensors outlive the engine.
    unsafe {
        match predicted {
            None => engine.submit(updates, &mut None, STREAM),
            Some(ahead) => engine.submit_deferred(ahead, updates, &mut None, STREAM),
        }
    }
}

fn settle(engine: &Engine) {
    assert!(engine.finish(STREAM, SOON).expect("a step that works"));
    engine.settle(STREAM).expect("a step that works");
    finish(engine);
}

/// For the oracle.
fn copies(all: &[OnDevice]) -> Vec<Held> {
    all.iter().map(|one| one.held.moved(0)).collect()
}

/// Fails unless each has the state of the oracle, and the device its weight.
fn assert_stepped(all: &mut [OnDevice], expected: &mut [Held], what: &str) {
    for (one, expected) in all.iter_mut().zip(expected) {
        one.held.set_grad(|at| expected.grad.value(at));
        one.held.assert_same(expected, &format!("{:?}, {what}", expected.layout));
        one.assert_uploaded();
    }
}

/// The hyper-parameters of a step: each has its own.
fn hyper_of(step: u64) -> Hyper {
    let lr = 1e-2 / (step as f64);
    Hyper { lr, weight_decay: 0.1, grad_scale: 1.0 / (1.0 + step as f64), ..Hyper::default() }
}

#[test]
fn every_gradient_is_applied_once_with_the_coefficients_of_its_step() {
    for interval in [1, 3] {
        let mut all = tensors(MomentsKind::Float32);
        let mut expected = copies(&all);
        let deferred = deferred_on(host, &mut all, interval);
        let engine = &deferred.engine;
        for count in 1..=7 {
            draw(&mut all, &mut expected, count);
            take(engine, &all, |_| true).expect("gradients");
            let hyper = hyper_of(count);
            let updates = updates(&mut all, |_| count, hyper, |_| true);
            submit(engine, &updates, Some(2.0)).expect("a step");
            assert!(engine.finish(STREAM, SOON).expect("a step that works"));
            assert!(engine.timing().oldest_age < interval as u64, "{:?}", engine.timing());
            expected.iter_mut().for_each(|one| one.step(widest(), count, &hyper));
        }
        settle(engine);
        assert_stepped(&mut all, &mut expected, &format!("every {interval}"));
        assert!(!engine.settle(STREAM).expect("nothing"), "there was something left");
        deferred.gradients.assert_guards("gradients");
    }
}

/// For each segment the number of the step after which it was the oracle's.
fn ages(weight: &[u8], history: &[Vec<u8>], segment_nbytes: usize) -> Vec<usize> {
    let age = |(begin, part): (usize, &[u8])| {
        let begin = begin * segment_nbytes;
        let is_then = |then: &&Vec<u8>| &then[begin..begin + part.len()] == part;
        history.iter().rev().position(|then| is_then(&then)).expect("a weight of some step")
    };
    weight.chunks(segment_nbytes).enumerate().map(age).collect()
}

#[test]
fn weights_on_the_device_are_those_of_a_step_and_no_older_than_stated() {
    let interval = 3;
    let mut all = tensors(MomentsKind::Float32);
    for one in &mut all {
        one.weight = bytes(one.held.tensor().weight());
    }
    let mut expected = copies(&all);
    let deferred = deferred_on(host, &mut all, interval);
    let engine = &deferred.engine;
    let weights = |held: &mut Vec<Held>| -> Vec<Vec<u8>> {
        held.iter_mut().map(|one| bytes(one.tensor().weight())).collect()
    };
    let mut history = vec![weights(&mut expected)];
    let mut seen = [false; 8];
    for count in 1..=9 {
        draw(&mut all, &mut expected, count);
        take(engine, &all, |_| true).expect("gradients");
        let updates = updates(&mut all, |_| count, hyper_of(count), |_| true);
        submit(engine, &updates, Some(0.0)).expect("a step");
        finish(engine);
        expected.iter_mut().for_each(|one| one.step(widest(), count, &hyper_of(count)));
        history.push(weights(&mut expected));
        for (index, one) in all.iter().enumerate().filter(|(_, one)| one.held.numel > 0) {
            let of_tensor: Vec<Vec<u8>> = history.iter().map(|then| then[index].clone()).collect();
            let size = one.weight.len() / one.held.numel;
            for age in ages(&one.weight, &of_tensor, SEGMENT_LEN * size) {
                // The turn was a step ago, and the next comes in `interval`.
                assert!(age <= interval, "`{age}` steps behind, in tensor {index}");
                seen[age] |= count > 4;
            }
        }
    }
    // Each age is there, but none: weights land a step after their turn.
    assert_eq!(seen[..5], [false, true, true, true, false]);
}

#[test]
fn a_deferral_of_everything_at_once_is_an_exact_step_for_every_codec() {
    for moments in [MomentsKind::Float32, MomentsKind::Bf16, MomentsKind::Q8] {
        let mut all = tensors(moments);
        let mut expected = copies(&all);
        let deferred = deferred_on(host, &mut all, 2);
        let engine = &deferred.engine;
        for count in 1..=3 {
            draw(&mut all, &mut expected, count);
            take(engine, &all, |_| true).expect("gradients");
            let mut updates = updates(&mut all, |_| count, hyper_of(count), |_| true);
            updates.iter_mut().for_each(|update| update.is_at_once = count == 2);
            submit(engine, &updates, (count == 2).then_some(1.0)).expect("a step");
            finish(engine);
            expected.iter_mut().for_each(|one| one.step(widest(), count, &hyper_of(count)));
            assert_stepped(&mut all, &mut expected, &format!("step {count}"));
        }
    }
}

#[test]
fn a_tensor_may_miss_steps_and_gradients_may_be_discarded() {
    let mut all = tensors(MomentsKind::Float32);
    let mut expected = copies(&all);
    let deferred = deferred_on(host, &mut all, 4);
    let engine = &deferred.engine;
    let mut counts = vec![0; all.len()];
    for step in 1..=11_u64 {
        draw(&mut all, &mut expected, step);
        let takes = |index: usize| !(step + index as u64).is_multiple_of(3);
        take(engine, &all, takes).expect("gradients");
        if step % 4 == 0 {
            // Skipped.
            assert!(engine.finish(STREAM, SOON).expect("a step that works"));
            on_device::discard(engine);
            continue;
        }
        let hyper = hyper_of(step);
        (0..all.len()).filter(|&index| takes(index)).for_each(|index| counts[index] += 1);
        let updates = updates(&mut all, |index| counts[index], hyper, takes);
        assert!(engine.finish(STREAM, SOON).expect("a step that works"));
        submit(engine, &updates, Some(1.5)).expect("a step");
        for index in (0..all.len()).filter(|&index| takes(index)) {
            expected[index].step(widest(), counts[index], &hyper);
        }
        assert!(engine.finish(STREAM, SOON).expect("a step that works"));
        if step == 7 {
            settle(engine);
        }
    }
    settle(engine);
    assert_stepped(&mut all, &mut expected, "settled");
}

#[test]
fn gradients_of_the_next_step_are_taken_while_one_is_settled() {
    let mut all = tensors(MomentsKind::Float32);
    let mut expected = copies(&all);
    let deferred = deferred_on(host, &mut all, 2);
    let engine = &deferred.engine;
    for count in 1..=5 {
        draw(&mut all, &mut expected, count);
        // The first of them before what is pending is settled, the others after.
        take(engine, &all, |index| index < 2).expect("gradients");
        settle(engine);
        take(engine, &all, |index| index >= 2).expect("gradients");
        let updates = updates(&mut all, |_| count, hyper_of(count), |_| true);
        submit(engine, &updates, Some(1.0)).expect("a step");
        assert!(engine.finish(STREAM, SOON).expect("a step that works"));
        expected.iter_mut().for_each(|one| one.step(widest(), count, &hyper_of(count)));
    }
    settle(engine);
    assert_stepped(&mut all, &mut expected, "settled");
}

/// Weights are written on the device after what the stream held when the step was submitted.
fn assert_after_stream(gated: &Gated) {
    let calls = gated.calls.lock().expect("no panic");
    let first = |is: fn(&Call) -> bool| calls.iter().position(|(_, call)| is(call));
    let after = first(|call| matches!(call, Call::After(Lane::Upload))).expect("an order");
    let copy = first(|call| matches!(call, Call::Copy(Lane::Upload, _))).expect("an upload");
    assert!(after < copy, "{calls:?}");
}

/// More of them than land at once.
fn small_tensors() -> Vec<OnDevice> {
    let one = |seed| {
        let layout = Layout::new(ParamKind::Split, MomentsKind::Float32, Dtype::BFloat16);
        OnDevice::new(Held::random(layout, 100, 0, Spread::Ordinary, seed))
    };
    (0..3 * LANDINGS_IN_FLIGHT_MAX as u64).map(one).collect()
}

#[test]
fn few_landings_are_with_the_device_at_once() {
    let mut all = small_tensors();
    let mut expected = copies(&all);
    let (gated, deferred) = gated(&mut all);
    let engine = &deferred.engine;
    let _resumed = Resumed(&gated.host);
    for count in 1..=2 {
        draw(&mut all, &mut expected, count);
        take(engine, &all, |_| true).expect("gradients");
        let updates = updates(&mut all, |_| count, hyper_of(count), |_| true);
        gated.calls.lock().expect("no panic").clear();
        gated.host.pause(Lane::Upload, count == 2);
        submit(engine, &updates, Some(0.0)).expect("a step");
        if count == 1 {
            finish(engine);
        }
        expected.iter_mut().for_each(|one| one.step(widest(), count, &hyper_of(count)));
    }
    let handed_over = || {
        let calls = gated.calls.lock().expect("no panic");
        calls.iter().filter(|(_, call)| matches!(call, Call::Copy(Lane::Upload, _))).count()
    };
    assert!(!engine.finish(STREAM, WATCHED).expect("a step that works"), "the uploads are late");
    assert_eq!(handed_over(), LANDINGS_IN_FLIGHT_MAX);
    assert_last_is_late(engine, &all);
    gated.host.pause(Lane::Upload, false);
    finish(engine);
    assert_eq!(handed_over(), all.len());
    assert_after_stream(&gated);
    gated.calls.lock().expect("no panic").clear();
    settle(engine);
    assert_after_stream(&gated);
    assert_stepped(&mut all, &mut expected, "settled");
}

#[test]
fn the_next_turn_is_known_when_the_step_before_has_its_own() {
    let mut all = small_tensors();
    all.truncate(3);
    let mut expected = copies(&all);
    let gated = Arc::new(Gated::with_events(256));
    let device = Arc::clone(&gated) as Arc<dyn Device>;
    let deferred = deferred_on(|_| device, &mut all, 3);
    let engine = &deferred.engine;
    let _resumed = Resumed(&gated.host);
    gated.streams_wait.store(false, Ordering::Relaxed);
    for count in 1..=3 {
        draw(&mut all, &mut expected, count);
        take(engine, &all, |_| true).expect("gradients");
        let updates = updates(&mut all, |_| count, hyper_of(count), |_| true);
        // The weights of the first turn land with the second step. The third one, which has been
        // submitted, does not begin before they have.
        gated.host.pause(Lane::Upload, count > 1);
        submit(engine, &updates, Some(0.0)).expect("a step");
        if count < 3 {
            let next = engine.next_group(SOON).expect("a step that works");
            assert_eq!(next, Some(count as usize));
        }
    }
    assert_eq!(engine.next_group(WATCHED).expect("a step that works"), None);
    gated.host.pause(Lane::Upload, false);
    assert_eq!(engine.next_group(SOON).expect("a step that works"), Some(0));
    finish(engine);
}

/// The weight of the last tensor is not with the device yet, and nothing stands for it.
fn assert_last_is_late(engine: &Engine, all: &[OnDevice]) {
    let last = all.len() - 1;
    let whole = 0..all[last].held.numel;
    let has_come = engine.wait(last, &whole, STREAM, WATCHED).expect("a step that works");
    assert!(!has_come, "an older weight");
}

#[test]
fn a_wait_for_a_weight_is_for_what_lands_without_a_gradient() {
    let mut all = small_tensors();
    let mut expected = copies(&all);
    let (gated, deferred) = gated(&mut all);
    let engine = &deferred.engine;
    let _resumed = Resumed(&gated.host);
    for count in 1..=4 {
        draw(&mut all, &mut expected, count);
        // Then predicted weights land, and then the host's own.
        let takes = |index: usize| index == 0 || count == 1 || count == 4;
        take(engine, &all, takes).expect("gradients");
        let updates = updates(&mut all, |_| count, hyper_of(count), takes);
        gated.host.pause(Lane::Upload, count == 3);
        submit(engine, &updates, Some(2.0)).expect("a step");
        if count == 3 {
            assert_last_is_late(engine, &all);
            gated.host.pause(Lane::Upload, false);
        }
        finish(engine);
        for (_, expected) in expected.iter_mut().enumerate().filter(|(at, _)| takes(*at)) {
            expected.step(widest(), count, &hyper_of(count));
        }
    }
    // All have had their turn, and none has landed.
    gated.host.pause(Lane::Upload, true);
    engine.settle(STREAM).expect("a step that works");
    assert_last_is_late(engine, &all);
    gated.host.pause(Lane::Upload, false);
    finish(engine);
    assert_stepped(&mut all, &mut expected, "settled");
}

/// Two steps of an engine with an interval of 1, whose weights run ahead by so much. The turn of
/// the second writes the memory that lands of the first: of the host's own weight, or of the
/// predicted one.
fn lands_late(mut all: Vec<OnDevice>, ahead: [f32; 2]) {
    let what = format!("{} tensors, {ahead:?}", all.len());
    let mut expected = copies(&all);
    let (gated, deferred) = gated(&mut all);
    let engine = &deferred.engine;
    let _resumed = Resumed(&gated.host);
    gated.streams_wait.store(false, Ordering::Relaxed);
    let hyper = Hyper { betas: (0.5, 0.75), ..hyper_of(1) };
    let mut landing: Vec<Vec<u8>> = Vec::new();
    for (count, ahead) in (1..).zip(ahead) {
        draw(&mut all, &mut expected, count);
        take(engine, &all, |_| true).expect("gradients");
        let updates = updates(&mut all, |_| count, hyper, |_| true);
        gated.host.pause(Lane::Upload, count == 2);
        submit(engine, &updates, Some(ahead)).expect("a step");
        if count == 1 {
            assert!(engine.finish(STREAM, SOON).expect("a step that works"));
            for expected in &mut expected {
                expected.step(widest(), count, &hyper);
                landing.push(match ahead {
                    0.0 => bytes(expected.tensor().weight()),
                    _ => moved_on(expected, ahead, 1, &hyper),
                });
            }
        }
    }
    assert!(!engine.finish(STREAM, WATCHED).expect("a step that works"), "the uploads are late");
    if ahead[0] == 0.0 {
        for (one, expected) in all.iter_mut().zip(&mut expected) {
            one.held.set_grad(|at| expected.grad.value(at));
            one.held.assert_same(expected, "while the last weights are on their way");
        }
    }
    gated.host.pause(Lane::Upload, false);
    finish(engine);
    for (one, landing) in all.iter().zip(&landing) {
        assert!(one.weight == *landing, "{:?}, {what}", one.held.layout);
    }
}

#[test]
fn what_lands_is_not_written_before_it_has() {
    for ahead in [[0.0, 0.0], [0.0, 2.5], [2.5, 2.5]] {
        lands_late(tensors(MomentsKind::Float32), ahead);
        // One alone, which waits for nothing else.
        lands_late(tensors(MomentsKind::Float32).split_off(5), ahead);
    }
}

#[test]
fn what_is_lent_stays_until_its_gradient_is_applied_and_has_landed() {
    let interval = 2;
    let mut all = tensors(MomentsKind::Float32);
    let mut expected = copies(&all);
    let deferred = deferred_on(host, &mut all, interval);
    let engine = &deferred.engine;
    let mut witnesses = Vec::new();
    let dropped = |witnesses: &[Arc<std::sync::atomic::AtomicUsize>]| -> Vec<usize> {
        witnesses.iter().map(|one| one.load(Ordering::SeqCst)).collect()
    };
    for count in 1..=7 {
        draw(&mut all, &mut expected, count);
        take(engine, &all, |_| true).expect("gradients");
        let updates = updates(&mut all, |_| count, hyper_of(count), |_| true);
        let (owners, witness): (Owners, _) = witness();
        witnesses.push(witness);
        // SAFETY: the tensors outlive the engine.
        unsafe { engine.submit_deferred(1.0, &updates, &mut Some(owners), STREAM) }
            .expect("a step");
        finish(engine);
        engine.returned().for_each(drop);
    }
    assert_eq!(dropped(&witnesses), [1, 1, 0, 0, 0, 0, 0]);
    settle(engine);
    engine.returned().for_each(drop);
    assert_eq!(dropped(&witnesses), [1; 7]);
}

#[test]
fn what_cannot_be_deferred_is_refused_with_nothing_changed() {
    let mut all = tensors(MomentsKind::Float32);
    let mut expected = copies(&all);
    let deferred = deferred_on(host, &mut all, 2);
    let engine = &deferred.engine;
    let refused = |result: Result<(), Error>| result.expect_err("must be refused").to_string();
    draw(&mut all, &mut expected, 1);
    take(engine, &all, |index| index != 2).expect("gradients");
    let mut of_all = updates(&mut all, |_| 1, hyper_of(1), |_| true);
    let message = refused(submit(engine, &of_all, Some(1.0)));
    assert!(message.contains("tensor `2` was not taken"), "{message}");
    take(engine, &all, |index| index == 2).expect("a gradient");
    for ahead in [-1.0, f32::NAN, 17.0] {
        let message = refused(submit(engine, &of_all, Some(ahead)));
        assert!(message.contains("predicted_updates"), "{message}");
    }
    submit(engine, &of_all, Some(1.0)).expect("a step");
    finish(engine);
    // Its state is elsewhere now, and gradients are pending.
    draw(&mut all, &mut expected, 2);
    take(engine, &all, |_| true).expect("gradients");
    let mut moved: Vec<Held> = all.iter().map(|one| one.held.moved(0)).collect();
    for (update, held) in of_all.iter_mut().zip(&mut moved) {
        update.tensor = without_grad(held.tensor());
        update.count = 2;
    }
    let message = refused(submit(engine, &of_all, Some(1.0)));
    assert!(message.contains("another state"), "{message}");
    let plain = Layout::new(ParamKind::PlainBf16, MomentsKind::Float32, Dtype::BFloat16);
    let mut held = Held::random(plain, 77, 0, Spread::Ordinary, 1);
    let tensor = without_grad(held.tensor());
    let without_master = Update { index: 5, tensor, weight: None, ..of_all[5] };
    let message = refused(submit(engine, &[without_master], Some(1.0)));
    assert!(message.contains("without a master"), "{message}");
    drain(engine).expect("copies");
}

#[test]
fn a_tensor_that_is_stepped_at_once_does_not_land_with_an_older_weight() {
    let mut all = tensors(MomentsKind::Float32);
    let mut expected = copies(&all);
    let (gated, deferred) = gated(&mut all);
    let engine = &deferred.engine;
    let _resumed = Resumed(&gated.host);
    for count in 1..=2 {
        draw(&mut all, &mut expected, count);
        take(engine, &all, |_| true).expect("gradients");
        let mut updates = updates(&mut all, |_| count, hyper_of(count), |_| true);
        updates[1].is_at_once = count == 2;
        if count == 2 {
            gated.host.pause(Lane::Download, true);
            draw(&mut all, &mut expected, count);
            take(engine, &all, |_| true).expect("gradients");
        }
        submit(engine, &updates, Some(1.0)).expect("a step");
        expected.iter_mut().for_each(|one| one.step(widest(), count, &hyper_of(count)));
        if count == 1 {
            assert!(engine.finish(STREAM, SOON).expect("a step that works"));
        }
    }
    // Its gradient has not come, so neither has its weight.
    let whole = 0..all[1].held.numel;
    assert!(!engine.wait(1, &whole, STREAM, WATCHED).expect("a step that works"), "an older one");
    gated.host.pause(Lane::Download, false);
    assert!(engine.wait(1, &whole, STREAM, SOON).expect("a step that works"));
    assert!(all[1].weight == bytes(expected[1].tensor().weight()));
    finish(engine);
}

/// Six steps of weights that run ahead by so much, of which the first tensor has a gradient in the
/// first only. Returns how many bytes have landed with all of them, and the bytes of that tensor.
fn landed_without_further_gradients(ahead: f32) -> (u64, u64) {
    let mut all = tensors(MomentsKind::Float32);
    let mut expected = copies(&all);
    let deferred = deferred_on(host, &mut all, 2);
    let engine = &deferred.engine;
    let mut landed = Vec::new();
    for count in 1..=6_u64 {
        draw(&mut all, &mut expected, count);
        let takes = |index: usize| index > 0 || count == 1;
        take(engine, &all, takes).expect("gradients");
        let updates = updates(&mut all, |_| count, hyper_of(count), takes);
        submit(engine, &updates, Some(ahead)).expect("a step");
        finish(engine);
        landed.push(engine.timing().bytes_uploaded);
        if count == 1 {
            expected[0].step(widest(), count, &hyper_of(count));
        }
    }
    assert!(all[0].weight == bytes(expected[0].tensor().weight()), "it runs ahead for ever");
    let [first, others @ ..] = [0, 1, 2, 3, 4, 5].map(|index| all[index].weight.len() as u64);
    let others: u64 = others.iter().sum();
    // A turn of each group, and a step that applies all that is left: it has landed before.
    assert_eq!(landed[4..].iter().sum::<u64>(), others);
    settle(engine);
    assert_eq!(engine.timing().bytes_uploaded, others);
    (landed.iter().sum(), first)
}

#[test]
fn a_predicted_weight_without_further_gradients_becomes_the_weight() {
    let (exact, _) = landed_without_further_gradients(0.0);
    let (predicted, nbytes) = landed_without_further_gradients(2.0);
    // It lands once more, and only where it ran ahead.
    assert_eq!(predicted - exact, nbytes);
}

/// As the device gets it when it runs ahead: the master moved on along its last update, rounded.
fn moved_on(held: &mut Held, ahead: f32, count: i32, hyper: &Hyper) -> Vec<u8> {
    let step_size = (hyper.lr / (1.0 - hyper.betas.0.powi(count))) as f32;
    let denom_scale = (1.0 / (1.0 - hyper.betas.1.powi(count)).sqrt()) as f32;
    let (mut master, (exp_avg, exp_avg_sq)) = (held.read_master(), held.read_moments());
    for (master, (exp_avg, exp_avg_sq)) in master.iter_mut().zip(exp_avg.iter().zip(&exp_avg_sq)) {
        let denom = exp_avg_sq.sqrt().mul_add(denom_scale, hyper.eps as f32);
        *master = (-(ahead * step_size)).mul_add(exp_avg / denom, *master);
    }
    let mut rounded = held.moved(0);
    rounded.write_master(&master);
    bytes(rounded.tensor().weight())
}

#[test]
fn predicted_weights_land_moved_on_along_their_last_update() {
    let mut all = tensors(MomentsKind::Float32);
    let mut expected = copies(&all);
    let deferred = deferred_on(host, &mut all, 1);
    let engine = &deferred.engine;
    let mut before: Vec<Vec<u8>> = Vec::new();
    for count in 1..=3_i32 {
        draw(&mut all, &mut expected, count as u64);
        take(engine, &all, |_| true).expect("gradients");
        // Their powers are exact.
        let hyper = Hyper { betas: (0.5, 0.75), ..hyper_of(count as u64) };
        let updates = updates(&mut all, |_| count as u64, hyper, |_| true);
        submit(engine, &updates, Some(2.5)).expect("a step");
        finish(engine);
        for (one, before) in all.iter().zip(&before) {
            assert!(one.weight == *before, "{:?}, step {count}", one.held.layout);
        }
        before.clear();
        for expected in &mut expected {
            expected.step(widest(), count as u64, &hyper);
            before.push(moved_on(expected, 2.5, count, &hyper));
        }
    }
    settle(engine);
    assert_stepped(&mut all, &mut expected, "settled");
}

#[test]
fn without_memory_for_predicted_weights_none_is_predicted() {
    let mut all = tensors(MomentsKind::Float32);
    let mut expected = copies(&all);
    let deferred = deferred_with(host, &mut all, 1, false);
    let engine = &deferred.engine;
    for count in 1..=2 {
        draw(&mut all, &mut expected, count);
        take(engine, &all, |_| true).expect("gradients");
        let updates = updates(&mut all, |_| count, hyper_of(count), |_| true);
        let refused = submit(engine, &updates, Some(1.0)).expect_err("must be refused");
        let message = "expected 0 of an engine without memory for predicted weights";
        assert!(refused.to_string().contains(message), "{refused}");
        submit(engine, &updates, Some(0.0)).expect("a step");
        finish(engine);
        expected.iter_mut().for_each(|one| one.step(widest(), count, &hyper_of(count)));
    }
    settle(engine);
    assert_stepped(&mut all, &mut expected, "settled");
}

#[test]
fn ages_and_bytes_are_those_of_the_job() {
    for (interval, ages) in [(1, [0; 4]), (3, [0, 1, 1, 1])] {
        let mut all = tensors(MomentsKind::Float32);
        let mut expected = copies(&all);
        let deferred = deferred_on(host, &mut all, interval);
        let engine = &deferred.engine;
        let taken: usize = all.iter().map(|one| one.grad.len()).sum();
        let mut landed = Vec::new();
        for (count, age) in (1..).zip(ages) {
            draw(&mut all, &mut expected, count);
            take(engine, &all, |_| true).expect("gradients");
            let updates = updates(&mut all, |_| count, hyper_of(count), |_| true);
            submit(engine, &updates, Some(0.0)).expect("a step");
            finish(engine);
            let timing = engine.timing();
            assert_eq!((timing.oldest_age, timing.bytes_downloaded), (age, taken as u64));
            landed.push(timing.bytes_uploaded);
        }
        // What has had its turn lands with the next job, so each group in turn.
        let whole: u64 = all.iter().map(|one| one.weight.len() as u64).sum();
        assert_eq!(landed[0], 0);
        assert_eq!(landed[1..=interval].iter().sum::<u64>(), whole);
        assert!(landed[1..].iter().all(|&nbytes| nbytes > 0), "{landed:?}");
        settle(engine);
        let timing = engine.timing();
        assert_eq!((timing.oldest_age, timing.bytes_downloaded), (0, 0));
        assert_eq!(timing.bytes_uploaded, whole);
    }
}

#[test]
fn state_may_move_only_when_its_weight_has_landed() {
    let mut all = tensors(MomentsKind::Float32);
    let mut expected = copies(&all);
    let deferred = deferred_on(host, &mut all, 1);
    let engine = &deferred.engine;
    let mut draw_and_take = |all: &mut [OnDevice], count| {
        draw(all, &mut expected, count);
        take(engine, all, |_| true).expect("gradients");
        expected.iter_mut().for_each(|one| one.step(widest(), count, &hyper_of(count)));
    };
    draw_and_take(&mut all, 1);
    let first = updates(&mut all, |_| 1, hyper_of(1), |_| true);
    submit(engine, &first, Some(0.0)).expect("a step");
    finish(engine);
    // No gradient is pending, and the device lacks the weight.
    draw_and_take(&mut all, 2);
    let mut elsewhere: Vec<Held> = all.iter().map(|one| one.held.moved(0)).collect();
    let mut second = updates(&mut all, |_| 2, hyper_of(2), |_| true);
    for (update, held) in second.iter_mut().zip(&mut elsewhere) {
        update.tensor = without_grad(held.tensor());
    }
    let message = submit(engine, &second, Some(0.0)).expect_err("must be refused").to_string();
    assert!(message.contains("another state"), "{message}");
    settle(engine);
    submit(engine, &second, Some(0.0)).expect("a step");
    settle(engine);
    for (one, held) in all.iter_mut().zip(elsewhere) {
        one.held = held;
    }
    assert_stepped(&mut all, &mut expected, "elsewhere");
}

#[test]
fn memory_that_does_not_fit_is_refused() {
    let numels = [10];
    let mut memory = Guarded::zeros(Dtype::Uint8, 1024, 0);
    let memory: View = memory.view();
    let refused = |interval, dtypes: &[Dtype], gradients, predicted| {
        let deferral = Deferral { interval, dtypes, gradients, predicted, selection: None };
        let shape = Shape { numels: &numels, generations: 2, deferral: Some(deferral) };
        let made = Engine::on(host(64), shape, Arc::new(Ram), pool_of(1), widest());
        made.err().expect("must be refused").to_string()
    };
    let one = [Dtype::BFloat16];
    assert_eq!(
        deferral_nbytes(&numels, &one, 2).expect("an interval"),
        ((3 + 2) * 64, 64),
        "shares of one place each"
    );
    let fits = memory.part(0..(3 + 2) * 64);
    let is_refused = |gradients, predicted, message| {
        let found = refused(2, &one, gradients, predicted);
        assert!(found.contains(message), "{found}");
    };
    is_refused(memory.part(0..(3 + 2) * 64 - 4), None, "gradients has");
    is_refused(memory.part(4..(3 + 2) * 64 + 4), None, "the address of gradients is");
    is_refused(fits, Some(memory.part(512..512 + 60)), "predicted has");
    is_refused(fits, Some(memory.part(516..516 + 64)), "the address of predicted is");
    assert!(refused(2, &[], fits, None).contains("dtypes"));
    assert!(refused(0, &one, fits, None).contains("interval is `0`"));
    assert!(refused(9, &one, fits, None).contains("interval is `9`"));
}

#[test]
fn groups_are_of_about_one_size() {
    let numels = [100, 10, 40];
    let dtypes = [Dtype::BFloat16, Dtype::Float32, Dtype::Float32];
    // 256 bytes, 64 and 192, with what aligns them.
    for (interval, of_gradients, of_group) in
        [(1, 2 * 512, 512), (2, 5 * 256, 256), (3, 9 * 256, 256)]
    {
        assert_eq!(
            deferral_nbytes(&numels, &dtypes, interval).expect("an interval"),
            (of_gradients, of_group)
        );
    }
}
