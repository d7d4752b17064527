//! Selected channels: the device steps them in every job, with the bits that the host gives them
//! where its moments are fp32, and nothing is lost or applied twice when the selection changes.

#[path = "../battery/mod.rs"]
mod battery;
#[path = "../on_device/mod.rs"]
mod on_device;

mod channels;
mod coded;
mod room;
mod runs;

use std::sync::Arc;

use battery::{Draw, Guarded, Held, Layout, MomentsKind, ParamKind, Spread, pool_of, widest};
use on_device::{Gated, OnDevice, SOON, STREAM, bytes, finish, numels};
use stepwell::{
    Error,
    adam::{Hyper, tensor::AdamTensor},
    offload::{
        Change, Deferral, Engine, OnDevice as Work, SEGMENT_LEN, Selectable, Selection, Shape,
        Update, deferral_nbytes, selection_nbytes,
    },
    stream::element::Dtype,
    tier::ram::Ram,
};

/// Rows that cross the border of two segments, small matrices, one row, a vector, and nothing.
const KINDS: [(ParamKind, Dtype, usize, usize); 9] = [
    (ParamKind::Split, Dtype::BFloat16, SEGMENT_LEN / 1001 + 10, 1001),
    (ParamKind::Float32, Dtype::Float32, 300, 77),
    (ParamKind::Shadowed, Dtype::Float16, 130, 40),
    (ParamKind::Split, Dtype::BFloat16, 0, 0),
    (ParamKind::Split, Dtype::BFloat16, 9, 2000),
    (ParamKind::Float32, Dtype::Float32, 1, 3),
    (ParamKind::Split, Dtype::BFloat16, 77, 0),
    (ParamKind::Float32WithBf16, Dtype::BFloat16, 30, 90),
    (ParamKind::Float32WithF16, Dtype::Float16, 41, 20),
];

fn tensors() -> Vec<OnDevice> {
    tensors_with(MomentsKind::Float32)
}

fn tensors_with(moments: MomentsKind) -> Vec<OnDevice> {
    let one = |(seed, (param, grad, rows, row_len)): (usize, (ParamKind, Dtype, usize, usize))| {
        let layout = Layout::new(param, moments, grad);
        let numel = rows * row_len.max(1);
        let mut held = Held::random(layout, numel, 0, Spread::Ordinary, seed as u64);
        held.key = seed as u64;
        let mut one = OnDevice::new(held);
        one.weight = bytes(one.held.tensor().weight());
        one
    };
    KINDS.into_iter().enumerate().map(one).collect()
}

fn row_lens() -> Vec<usize> {
    KINDS.iter().map(|(.., row_len)| *row_len).collect()
}

/// An engine with its memory. Fields are dropped in this order.
struct Selecting {
    engine: Engine,
    device: Arc<Gated>,
    guarded: [Guarded; 4],
}

fn selecting(all: &mut [OnDevice], interval: usize, fraction: f64) -> Selecting {
    let numels = numels(all);
    let dtypes: Vec<_> = all.iter_mut().map(|one| one.held.tensor().weight().dtype()).collect();
    let row_lens = row_lens();
    let (gradients, predicted) = deferral_nbytes(&numels, &dtypes, interval).expect("sizes");
    let (device, staging) =
        selection_nbytes(&numels, &dtypes, interval, &row_lens, fraction).expect("sizes");
    let mut guarded = [gradients, predicted, device, staging]
        .map(|nbytes| Guarded::zeros(Dtype::Uint8, nbytes, 0));
    let [gradients, predicted, device, staging] = guarded.each_mut().map(Guarded::view);
    let selection =
        Selection { row_lens: &row_lens, fraction, device: device.address() as u64, staging };
    let deferral = Deferral {
        interval,
        dtypes: &dtypes,
        gradients,
        predicted: Some(predicted),
        selection: Some(selection),
    };
    let shape = Shape { numels: &numels, generations: 2, deferral: Some(deferral) };
    let device = Arc::new(Gated::with_events(Engine::events(shape)));
    let on: Arc<Gated> = Arc::clone(&device);
    let engine = Engine::on(on, shape, Arc::new(Ram), pool_of(3), widest()).expect("an engine");
    Selecting { engine, device, guarded }
}

fn draw(all: &mut [OnDevice], expected: &mut [Held], seed: u64) {
    for (index, (one, expected)) in all.iter_mut().zip(expected).enumerate() {
        let mut draw = Draw::new(seed << 8 | index as u64);
        let values: [f32; 251] = std::array::from_fn(|_| draw.normal() as f32);
        expected.set_grad(|at| values[at % values.len()]);
        one.grad = bytes(expected.grad.view());
    }
}

fn hyper_of(step: u64) -> Hyper {
    Hyper {
        lr: 1e-2 / (step as f64),
        weight_decay: 0.1,
        decoupled: !step.is_multiple_of(3),
        maximize: step.is_multiple_of(5),
        grad_scale: 1.0 / (1.0 + step as f64),
        ..Hyper::default()
    }
}

/// Distinct numbers below `end`, ascending.
fn some(draw: &mut Draw, count: usize, end: usize) -> Vec<u32> {
    let mut all: Vec<u32> = (0..end as u32).collect();
    for place in 0..count {
        let other = place + draw.below(end - place);
        all.swap(place, other);
    }
    all.truncate(count);
    all.sort_unstable();
    all
}

/// As many channels as may be selected.
fn change_of(draw: &mut Draw, one: &Selectable) -> Change {
    let by_columns = one.row_count == 0 || one.column_count > 0 && draw.below(2) == 0;
    let (count, end) =
        if by_columns { (one.column_count, one.row_len) } else { (one.row_count, one.rows) };
    Change { segment: one.segment, by_columns, indices: some(draw, count, end) }
}

/// The elements of a tensor that are selected.
fn elements(one: &Selectable, change: &Change) -> Vec<usize> {
    let of = |&channel: &u32| -> Vec<usize> {
        let channel = channel as usize;
        let place = |at: usize| match change.by_columns {
            true => at * one.row_len + channel,
            false => channel * one.row_len + at,
        };
        let len = if change.by_columns { one.rows } else { one.row_len };
        (0..len).map(|at| one.first + place(at)).collect()
    };
    change.indices.iter().flat_map(of).collect()
}

/// Its gradient is the engine's.
fn without_grad(mut tensor: AdamTensor) -> AdamTensor {
    tensor.grad = None;
    tensor
}

fn submit(
    engine: &Engine,
    all: &mut [OnDevice],
    deferred: Option<f32>,
    (count, hyper): (u64, Hyper),
    has: impl Fn(usize) -> Option<bool>,
    changes: Vec<Change>,
) -> Result<(), Error> {
    let with_grad: Vec<usize> = (0..all.len()).filter(|&index| has(index).is_some()).collect();
    let source = |one: &OnDevice| one.grad.as_ptr().expose_provenance() as u64;
    let gradients: Vec<_> = with_grad.iter().map(|&index| (index, source(&all[index]))).collect();
    let updates: Vec<Update> = with_grad
        .iter()
        .map(|&index| {
            let update = all[index].update(index, count, hyper);
            let tensor = without_grad(update.tensor);
            Update { tensor, is_at_once: has(index) == Some(true), ..update }
        })
        .collect();
    let grads: Vec<u64> = gradients.iter().map(|(_, source)| *source).collect();
    // SAFETY: the tensors outlive the engine.
    unsafe {
        assert!(engine.take_deferred(&gradients, &mut None, STREAM, SOON)?, "there is no room");
        let work = Work { grads: &grads, changes };
        engine.submit_with(deferred, &updates, work, &mut None, STREAM)
    }
}

fn assert_stepped(all: &mut [OnDevice], expected: &mut [Held], what: &str) {
    for (one, expected) in all.iter_mut().zip(expected) {
        one.held.set_grad(|at| expected.grad.value(at));
        one.held.assert_same(expected, &format!("{:?}, {what}", expected.layout));
        one.assert_uploaded();
    }
}
