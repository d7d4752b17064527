//! Deferred steps of the engine: every gradient is applied once, with the coefficients of its own
//! step, at most as late as stated, and what lands is whole.

#[path = "../battery/mod.rs"]
mod battery;
#[path = "../on_device/mod.rs"]
mod on_device;

mod failures;
mod gradients;
mod landings;
mod predicted;
mod refused;
mod turns;

use std::sync::{Arc, atomic::Ordering};

use battery::{Draw, Guarded, Held, Layout, MomentsKind, ParamKind, Spread, pool_of, widest};
use on_device::{Gated, OnDevice, Resumed, SOON, STREAM, WATCHED, bytes, finish, numels};
use stepwell::{
    Error,
    adam::{Hyper, tensor::AdamTensor},
    device::{Device, Lane, host::HostDevice},
    offload::{Deferral, Engine, SEGMENT_LEN, Shape, Update, deferral_nbytes},
    state::chunk::CHUNK_LEN,
    stream::element::Dtype,
    tier::{Tier, ram::Ram},
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
    deferred_in(Arc::new(Ram), device, all, interval, predicts)
}

/// An engine with its state in `tier`.
fn deferred_in(
    tier: Arc<dyn Tier>,
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
    let engine = Engine::on(device, shape, tier, pool_of(3), widest()).expect("an engine");
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
