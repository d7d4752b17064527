//! Selected channels: the device steps them in every job, with the bits that the host gives them
//! where its moments are fp32, and nothing is lost or applied twice when the selection changes.

mod battery;
mod on_device;

use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering},
};

use battery::{
    Draw, Guarded, Held, Layout, MomentsKind, ParamKind, Spread, is_same, pool_of, widest,
};
use on_device::{Gated, OnDevice, Resumed, SOON, STREAM, bytes, drain, finish, numels};
use stepwell::{
    Error,
    adam::{
        Hyper, Step,
        selected::{self, ChannelState, Shape as Channels, WeightKind},
        tensor::AdamTensor,
    },
    device::Lane,
    offload::{
        Change, Deferral, Engine, OnDevice as Work, SEGMENT_LEN, Scope, Selectable, Selection,
        Shape, Update, deferral_nbytes, selection_nbytes,
    },
    stream::{element::Dtype, view::View},
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

const CODECS: [MomentsKind; 2] = [MomentsKind::Bf16, MomentsKind::Q8];

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
    selecting_in(all, interval, Scope::Tensor(fraction))
}

fn selecting_in(all: &mut [OnDevice], interval: usize, scope: Scope) -> Selecting {
    let numels = numels(all);
    let dtypes: Vec<_> = all.iter_mut().map(|one| one.held.tensor().weight().dtype()).collect();
    let row_lens = row_lens();
    let (gradients, predicted) = deferral_nbytes(&numels, &dtypes, interval).expect("sizes");
    let (device, staging) =
        selection_nbytes(&numels, &dtypes, interval, &row_lens, scope).expect("sizes");
    let mut guarded = [gradients, predicted, device, staging]
        .map(|nbytes| Guarded::zeros(Dtype::Uint8, nbytes, 0));
    let [gradients, predicted, device, staging] = guarded.each_mut().map(Guarded::view);
    let selection =
        Selection { row_lens: &row_lens, scope, device: device.address() as u64, staging };
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

/// Some channels whose state has room in so many bytes; None: not one has.
fn change_within(draw: &mut Draw, one: &Selectable, nbytes_max: usize) -> Option<Change> {
    let shape =
        |by_columns, count| Channels { rows: one.rows, row_len: one.row_len, count, by_columns };
    let room = |by_columns| nbytes_max / shape(by_columns, 1).nbytes();
    let by_columns = one.column_count > 0 && (room(false) == 0 || draw.below(2) == 0);
    let end = if by_columns { one.row_len } else { one.rows };
    let count_max = room(by_columns).min(end);
    (count_max > 0).then(|| {
        // Often as many as there is room for.
        let count = if draw.below(2) == 0 { count_max } else { 1 + draw.below(count_max) };
        Change { segment: one.segment, by_columns, indices: some(draw, count, end) }
    })
}

/// As many channels as may be selected.
fn change_of(draw: &mut Draw, one: &Selectable) -> Change {
    let by_columns = one.row_count == 0 || one.column_count > 0 && draw.below(2) == 0;
    let (count, end) =
        if by_columns { (one.column_count, one.row_len) } else { (one.row_count, one.rows) };
    Change { segment: one.segment, by_columns, indices: some(draw, count, end) }
}

/// How much memory the copy of each segment has.
struct Room {
    fixed: HashMap<usize, usize>,
    shared: usize,
    of: HashMap<usize, usize>,
}

impl Room {
    fn new(selectable: &[Selectable], device_nbytes: usize) -> Self {
        let own = selectable.iter().filter(|one| one.nbytes > 0);
        let fixed: HashMap<_, _> = own.map(|one| (one.segment, one.nbytes)).collect();
        let shared = device_nbytes - fixed.values().sum::<usize>();
        Self { of: fixed.clone(), fixed, shared }
    }

    /// Some selections that a step may begin with, of these.
    fn changes<'a>(
        &mut self,
        draw: &mut Draw,
        is_whole: bool,
        from: impl Iterator<Item = &'a Selectable>,
    ) -> Vec<Change> {
        let mut left = if is_whole { self.shared } else { 0 };
        if is_whole {
            self.of.clone_from(&self.fixed);
        }
        let mut changes = Vec::new();
        for one in from {
            let own = self.of.get(&one.segment).copied();
            let change = (draw.below(3) > 0)
                .then(|| change_within(draw, one, own.unwrap_or(left)))
                .flatten();
            if let (Some(change), None) = (&change, own) {
                let (count, by_columns) = (change.indices.len(), change.by_columns);
                let shape = Channels { rows: one.rows, row_len: one.row_len, count, by_columns };
                let nbytes = shape.nbytes().next_multiple_of(64);
                self.of.insert(one.segment, nbytes);
                left -= nbytes;
            }
            changes.extend(change);
        }
        changes
    }
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

/// What a test knows of the selections of an engine.
#[derive(Default)]
struct Known {
    /// By segment; whether it was stepped on the device.
    held: HashMap<usize, (Selectable, Change, bool)>,
}

impl Known {
    /// The device has the last weights of all that it steps.
    fn assert_current(&self, all: &[OnDevice], expected: &mut [Held], what: &str) {
        for (one, change, is_stepped) in self.held.values() {
            if !is_stepped {
                continue;
            }
            let weight = bytes(expected[one.tensor].tensor().weight());
            let size = weight.len() / expected[one.tensor].numel;
            for at in elements(one, change) {
                let range = at * size..(at + 1) * size;
                assert!(
                    all[one.tensor].weight[range.clone()] == weight[range],
                    "{what}: element {at} of tensor {}, {change:?}",
                    one.tensor
                );
            }
        }
    }
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

/// Steps with selections, tensors without gradients, and settles as they come.
fn any_run(seed: u64, interval: usize, scope: Scope) {
    let what = format!("seed {seed}, every {interval}, {scope:?}");
    let mut all = tensors();
    let mut expected: Vec<Held> = all.iter().map(|one| one.held.moved(0)).collect();
    let mut selecting = selecting_in(&mut all, interval, scope);
    let device_nbytes = selecting.guarded[2].view().nbytes();
    let engine = &selecting.engine;
    let selectable: Vec<Selectable> = engine.selectable().collect();
    let mut room = Room::new(&selectable, device_nbytes);
    let mut draw_of = Draw::new(seed);
    let mut known = Known::default();
    for step in 1..=11_u64 {
        draw(&mut all, &mut expected, seed << 16 | step);
        let is_whole = step == 1 || draw_of.below(6) == 0;
        // None: no gradient; whether it is stepped at once.
        let mut has: Vec<Option<bool>> =
            (0..all.len()).map(|_| (draw_of.below(4) > 0).then(|| draw_of.below(5) == 0)).collect();
        // Its turn comes without a gradient.
        if (4..4 + interval as u64 + 1).contains(&step) {
            has[0] = None;
        }
        let group = engine.next_group(SOON).expect("a step that works").expect("it is over");
        let may_change = |one: &&Selectable| {
            has[one.tensor].is_some()
                && (is_whole || one.group == group && has[one.tensor] == Some(false))
        };
        let from = selectable.iter().filter(may_change);
        let changes = room.changes(&mut draw_of, is_whole, from);
        let deferred = (!is_whole).then_some(2.0);
        let hyper = hyper_of(step);
        submit(engine, &mut all, deferred, (step, hyper), |index| has[index], changes.clone())
            .expect("a step");
        for (index, one) in expected.iter_mut().enumerate() {
            if has[index].is_some() {
                one.step(widest(), step, &hyper);
            }
        }
        for (one, _, is_stepped) in known.held.values_mut() {
            *is_stepped |= has[one.tensor].is_some();
        }
        finish(engine);
        known.held.retain(|_, (one, ..)| match has[one.tensor] {
            _ if is_whole => false,
            has => has != Some(true),
        });
        known.assert_current(&all, &mut expected, &format!("{what}, step {step}"));
        for change in changes {
            let one = *selectable.iter().find(|one| one.segment == change.segment).expect("it");
            known.held.insert(one.segment, (one, change, false));
        }
        if draw_of.below(9) == 0 {
            engine.settle(STREAM).expect("a step that works");
            finish(engine);
            known.held.clear();
            assert_stepped(&mut all, &mut expected, &format!("{what}, settled at {step}"));
        }
    }
    engine.settle(STREAM).expect("a step that works");
    finish(engine);
    assert_stepped(&mut all, &mut expected, &what);
    assert!(!engine.settle(STREAM).expect("nothing"), "there was something left");
    for (guarded, name) in
        selecting.guarded.iter().zip(["gradients", "predicted", "device", "host"])
    {
        guarded.assert_guards(name);
    }
}

#[test]
fn every_gradient_is_applied_once_whoever_steps_it() {
    for (seed, interval, fraction) in [(1, 1, 0.1), (2, 4, 0.3), (3, 3, 1.0), (4, 5, 0.02)] {
        any_run(seed, interval, Scope::Tensor(fraction));
    }
    for (seed, interval, budget_bytes) in [(5, 3, 60_000), (6, 4, 1 << 30)] {
        any_run(seed, interval, Scope::Global(budget_bytes));
    }
}

/// In fp32 what the device's copy of a segment has to have: it begins with the host's state.
struct Copied {
    one: Selectable,
    change: Change,
    held: Held,
    is_stepped: bool,
}

impl Copied {
    fn new(host: &mut Held, one: Selectable, change: Change) -> Self {
        let layout = Layout { moments: MomentsKind::Float32, ..host.layout };
        let mut held = Held::zeros(layout, host.numel, 0);
        let (master, (exp_avg, exp_avg_sq)) = (host.read_master(), host.read_moments());
        held.write(&master, &exp_avg, &exp_avg_sq);
        Self { one, change, held, is_stepped: false }
    }

    fn step(&mut self, grad: &Guarded, count: u64, hyper: &Hyper) {
        self.held.grad = grad.moved(0);
        self.held.step(widest(), count, hyper);
        self.is_stepped = true;
    }

    /// How many of its weights the host has rounded otherwise.
    fn num_apart(&mut self, host: &mut Held) -> usize {
        let (ours, hosts) = (bytes(self.held.tensor().weight()), bytes(host.tensor().weight()));
        let size = ours.len() / self.held.numel;
        let is_apart = |at: &usize| {
            let range = at * size..(at + 1) * size;
            ours[range.clone()] != hosts[range]
        };
        elements(&self.one, &self.change).iter().filter(|at| is_apart(at)).count()
    }

    /// The device has its weights, and some that the host has rounded otherwise.
    fn assert_current(&mut self, weights: &[u8], host: &mut Held, what: &str) -> usize {
        if !self.is_stepped {
            return 0;
        }
        let ours = bytes(self.held.tensor().weight());
        let size = ours.len() / self.held.numel;
        for at in elements(&self.one, &self.change) {
            let range = at * size..(at + 1) * size;
            assert!(
                weights[range.clone()] == ours[range],
                "{what}: element {at} of tensor {}, {:?}",
                self.one.tensor,
                self.change
            );
        }
        self.num_apart(host)
    }
}

/// What an engine has done with a segment.
#[derive(Clone, Copy, Default)]
struct Done {
    is_pending: bool,
    /// The step of its last turn, where no landing of its own has followed.
    turned_at: Option<u64>,
}

/// Where the host codes moments: its state is that of an engine without a selection, bit for bit,
/// and what forwards read of selected channels is what fp32 makes of the state that was copied.
///
/// In a calm run copies last until they have parted from the host, which takes two turns. Then a
/// turn comes with nothing to apply.
fn coded_run(
    moments: MomentsKind,
    seed: u64,
    interval: usize,
    fraction: f64,
    predicted: f32,
    is_calm: bool,
) {
    let what = format!("{moments:?}, seed {seed}, every {interval}, {fraction}, {predicted}");
    let (mut all, mut others) = (tensors_with(moments), tensors_with(moments));
    let mut drawn: Vec<Held> = all.iter().map(|one| one.held.moved(0)).collect();
    let with = selecting(&mut all, interval, fraction);
    let without = selecting(&mut others, interval, 0.0);
    let engines = [&with.engine, &without.engine];
    let selectable: Vec<Selectable> = with.engine.selectable().collect();
    let mut draw_of = Draw::new(seed);
    let mut copies: HashMap<usize, Copied> = HashMap::new();
    let mut done: HashMap<usize, Done> = HashMap::new();
    let (mut num_apart, mut num_renewed) = (0, 0);
    let turns = 2 * interval as u64;
    let num_steps = if is_calm { 2 * turns + 6 } else { 13 };
    for step in 1..=num_steps {
        let what = format!("{what}, step {step}");
        draw(&mut all, &mut drawn, seed << 16 | step);
        for (one, other) in all.iter().zip(&mut others) {
            other.grad.clone_from(&one.grad);
        }
        let is_whole = step == 1 || if is_calm { step == num_steps } else { draw_of.below(9) == 0 };
        let mut has: Vec<Option<bool>> =
            (0..all.len()).map(|_| (draw_of.below(4) > 0).then(|| draw_of.below(7) == 0)).collect();
        // Its turn comes with nothing to apply, after it was stepped.
        for (place, one) in has.iter_mut().enumerate() {
            let begin = if is_calm { 2 + turns } else { 3 } + place as u64 % 3;
            let gap = begin..begin + turns + 1;
            if gap.contains(&step) {
                *one = None;
            } else if step < gap.start {
                *one = Some(false);
            }
        }
        let group = with.engine.next_group(SOON).expect("a step that works").expect("it is over");
        let may_change = |one: &&Selectable| {
            has[one.tensor].is_some()
                && (is_whole || one.group == group && has[one.tensor] == Some(false))
        };
        let mut changes = Vec::new();
        for one in selectable.iter().filter(may_change) {
            if is_whole || draw_of.below(3) > usize::from(is_calm) {
                changes.push(change_of(&mut draw_of, one));
            }
        }
        let (deferred, hyper) = ((!is_whole).then_some(predicted), hyper_of(step));
        for (engine, all, changes) in
            [(engines[0], &mut all, changes.clone()), (engines[1], &mut others, Vec::new())]
        {
            submit(engine, all, deferred, (step, hyper), |index| has[index], changes)
                .expect("a step");
            finish(engine);
        }
        for copied in copies.values_mut() {
            if has[copied.one.tensor].is_some() {
                copied.step(&drawn[copied.one.tensor].grad, step, &hyper);
            }
        }
        copies.retain(|_, copied| !is_whole && has[copied.one.tensor] != Some(true));
        if is_whole {
            all.iter_mut().for_each(OnDevice::assert_uploaded);
        }
        for one in &selectable {
            let done = done.entry(one.segment).or_default();
            let is_turn = one.group == group;
            if is_whole || has[one.tensor] == Some(true) {
                *done = Done::default();
            } else if is_turn && (done.is_pending || has[one.tensor].is_some()) {
                *done = Done { is_pending: false, turned_at: Some(step) };
            } else if has[one.tensor].is_some() {
                done.is_pending = true;
            } else if is_turn && done.turned_at.is_some_and(|turned_at| step > turned_at + 1) {
                done.turned_at = None;
                // The host's own weight has landed, and the copy begins anew.
                if let Some(mut copied) = copies.remove(&one.segment) {
                    let host = &mut others[one.tensor].held;
                    num_renewed += usize::from(copied.num_apart(host) > 0);
                    let mut renewed = Copied::new(host, *one, copied.change);
                    renewed.is_stepped = true;
                    copies.insert(one.segment, renewed);
                }
            }
        }
        for copied in copies.values_mut() {
            let tensor = copied.one.tensor;
            let weights = &all[tensor].weight;
            num_apart += copied.assert_current(weights, &mut others[tensor].held, &what);
        }
        for change in changes {
            let one = *selectable.iter().find(|one| one.segment == change.segment).expect("it");
            let copied = Copied::new(&mut others[one.tensor].held, one, change);
            copies.insert(one.segment, copied);
        }
        if !is_calm && draw_of.below(6) == 0 || step == num_steps {
            for engine in engines {
                engine.settle(STREAM).expect("a step that works");
                finish(engine);
            }
            copies.clear();
            done.clear();
            for (one, other) in all.iter_mut().zip(&mut others) {
                one.held.assert_same(&mut other.held, &what);
                // No weight of a copy is left.
                one.assert_uploaded();
            }
        }
    }
    assert!(num_apart > 0, "{what}: no copy has parted from the host");
    assert!(num_renewed > 0 || !is_calm, "{what}: no turn came with nothing to apply");
    assert!(!with.engine.settle(STREAM).expect("nothing"), "there was something left");
    for (guarded, name) in with.guarded.iter().zip(["gradients", "predicted", "device", "host"]) {
        guarded.assert_guards(name);
    }
}

#[test]
fn coded_state_is_that_without_a_selection_and_copies_step_in_fp32() {
    coded_run(MomentsKind::Bf16, 1, 1, 0.1, 2.0, false);
    coded_run(MomentsKind::Q8, 2, 2, 1.0, 0.0, false);
    coded_run(MomentsKind::Q8, 3, 3, 0.3, 2.0, false);
    coded_run(MomentsKind::Q8, 4, 2, 0.5, 0.0, true);
}

#[test]
fn nothing_is_selectable_that_crosses_a_border_and_everything_with_all() {
    let mut all = tensors();
    let selecting = selecting(&mut all, 2, 0.1);
    let found: Vec<_> = selecting
        .engine
        .selectable()
        .map(|one| (one.tensor, one.first, one.rows, one.row_len, one.row_count, one.column_count))
        .collect();
    let rows = SEGMENT_LEN / 1001;
    let expected = [
        (0, 0, rows, 1001, rows / 10, 100),
        (0, (rows + 1) * 1001, 9, 1001, 0, 100),
        (1, 0, 300, 77, 30, 7),
        (2, 0, 130, 40, 13, 4),
        (4, 0, 9, 2000, 0, 200),
        (6, 0, 1, 77, 1, 0),
        (7, 0, 30, 90, 3, 9),
        (8, 0, 41, 20, 4, 2),
    ];
    assert_eq!(found, expected);
    drop(selecting);
    let selecting = self::selecting(&mut all, 2, 1.0);
    let numel: usize = selecting.engine.selectable().map(|one| one.rows * one.row_len).sum();
    assert_eq!(numel, all.iter().map(|one| one.held.numel).sum::<usize>());
}

/// A state of its own in fp32, of channels of a block, beside the oracle's. Of coded moments it
/// begins with what they decode to.
#[test]
fn a_step_of_channels_has_the_bits_of_a_step_of_their_tensor_in_fp32() {
    let spreads = [Spread::Ordinary, Spread::Wide];
    for (seed, (param, grad, rows, row_len)) in KINDS.into_iter().enumerate().skip(1) {
        for (spread, by_columns) in spreads.into_iter().flat_map(|one| [(one, false), (one, true)])
        {
            for moments in [MomentsKind::Float32].into_iter().chain(CODECS) {
                if row_len > 0 {
                    let layout = Layout::new(param, moments, grad);
                    steps_channels(layout, (rows, row_len), spread, by_columns, seed as u64);
                }
            }
        }
    }
}

fn steps_channels(
    layout: Layout,
    (rows_in_all, row_len): (usize, usize),
    spread: Spread,
    by_columns: bool,
    seed: u64,
) {
    let mut held = Held::random(layout, rows_in_all * row_len, 0, spread, seed);
    // A parameter that the program has written is the pass's to see.
    let master = held.read_master();
    held.write_master(&master);
    let mut draw = Draw::new(seed);
    // A block begins with any row.
    let first = rows_in_all / 4 * row_len;
    let rows = rows_in_all - rows_in_all / 4;
    let end = if by_columns { row_len } else { rows };
    let indices = some(&mut draw, end.div_ceil(3), end);
    let shape = Channels { rows, row_len, count: indices.len(), by_columns };
    let mut memory = Guarded::zeros(Dtype::Uint8, shape.nbytes(), 0);
    let (state, _) = ChannelState::within(memory.view(), &shape);
    let before = held.moved(0);
    let (exp_avg, exp_avg_sq) = held.read_moments();
    let decoded = Layout { moments: MomentsKind::Float32, ..layout };
    let mut expected = Held::zeros(decoded, held.numel, 0);
    expected.write(&master, &exp_avg, &exp_avg_sq);
    expected.set_grad(|at| held.grad.value(at));
    let tensor = held.tensor();
    let block = without_grad(tensor).without_fingerprints();
    let channels = (&shape, indices.as_slice());
    let (kind, hyper) = (WeightKind::of(&tensor).expect("a kind"), hyper_of(1 + seed));
    let of_block = first..first + shape.block_len();
    let gradient: View = tensor.grad.expect("a gradient").part(of_block.clone());
    expected.step(widest(), 3, &hyper);
    let step = Step::new(&hyper, 3);
    let weight = block.weight().part(of_block.clone());
    // SAFETY: all memory is the test's own.
    unsafe {
        selected::read(widest(), (&block, first), channels, &state);
        selected::step(widest(), &step, channels, kind, gradient, &state, weight);
    }
    let what = format!("{layout:?}, {spread:?}, by columns: {by_columns}");
    let is_selected = |at: usize| {
        let at = at.checked_sub(first);
        let channel = at.map(|at| if by_columns { at % row_len } else { at / row_len });
        channel.is_some_and(|channel| indices.contains(&(channel as u32)))
    };
    // The weights of the block, and nothing else.
    let written = if held.weight_out.is_some() { "weight_out" } else { "param" };
    for ((name, ours), (_, before)) in held.buffers().zip(before.buffers()) {
        if name != written {
            assert!(ours.payload() == before.payload(), "{what}: {name}");
            continue;
        }
        let (_, stepped) = expected.buffers().find(|(other, _)| *other == name).expect("it");
        let size = ours.payload().len() / ours.numel();
        for at in 0..ours.numel() {
            let range = at * size..(at + 1) * size;
            let theirs = if is_selected(at) { stepped } else { before };
            assert!(
                ours.payload()[range.clone()] == theirs.payload()[range],
                "{what}: {name}[{at}]"
            );
        }
    }
    let (master, (exp_avg, exp_avg_sq)) = (expected.read_master(), expected.read_moments());
    for (view, values) in
        [(state.master, master), (state.exp_avg, exp_avg), (state.exp_avg_sq, exp_avg_sq)]
    {
        // SAFETY: as above.
        let ours = unsafe { view.slice::<f32>(0..view.numel()) };
        for (place, &ours) in ours.iter().enumerate() {
            let (outer, inner) = (place / shape.inner(), place % shape.inner());
            let at = first
                + match by_columns {
                    true => outer * row_len + indices[inner] as usize,
                    false => indices[outer] as usize * row_len + inner,
                };
            assert!(is_same(ours, values[at]), "{what}: {ours:e} against {:e}", values[at]);
        }
    }
    memory.assert_guards("state");
}

/// A landing that is late does not overtake the weights of selected channels, and the next step
/// waits for it.
#[test]
fn weights_of_selected_channels_outlast_a_late_landing() {
    let mut all = tensors();
    let mut expected: Vec<Held> = all.iter().map(|one| one.held.moved(0)).collect();
    let selecting = selecting(&mut all, 2, 0.2);
    let engine = &selecting.engine;
    let selectable: Vec<Selectable> = engine.selectable().collect();
    let mut draw_of = Draw::new(7);
    let mut known = Known::default();
    for step in 1..=8_u64 {
        draw(&mut all, &mut expected, step);
        let changes: Vec<Change> = match step {
            1 => selectable.iter().map(|one| change_of(&mut draw_of, one)).collect(),
            _ => Vec::new(),
        };
        let (deferred, hyper) = ((step > 1).then_some(2.0), hyper_of(step));
        let _resumed = Resumed(&selecting.device.host);
        selecting.device.host.pause(Lane::Upload, true);
        submit(engine, &mut all, deferred, (step, hyper), |_| Some(false), changes.clone())
            .expect("a step");
        expected.iter_mut().for_each(|one| one.step(widest(), step, &hyper));
        for change in changes {
            let one = *selectable.iter().find(|one| one.segment == change.segment).expect("it");
            known.held.insert(one.segment, (one, change, false));
        }
        if step > 1 {
            known.held.values_mut().for_each(|(_, _, is_stepped)| *is_stepped = true);
            known.assert_current(&all, &mut expected, &format!("step {step}, before its landing"));
        }
        selecting.device.host.pause(Lane::Upload, false);
        finish(engine);
        known.assert_current(&all, &mut expected, &format!("step {step}"));
    }
    engine.settle(STREAM).expect("a step that works");
    finish(engine);
    assert_stepped(&mut all, &mut expected, "late");
    drain(engine).expect("a device that works");
}

/// Some channels are stepped and some are not: the step says so, and so does all that comes after
/// it. The host's state is that of the step before.
#[test]
fn a_device_that_fails_within_a_step_fails_it_and_all_that_follow() {
    let mut all = tensors();
    let mut expected: Vec<Held> = all.iter().map(|one| one.held.moved(0)).collect();
    let selecting = selecting(&mut all, 2, 0.2);
    let engine = &selecting.engine;
    let mut draw_of = Draw::new(11);
    let changes = engine.selectable().map(|one| change_of(&mut draw_of, &one)).collect();
    draw(&mut all, &mut expected, 1);
    submit(engine, &mut all, None, (1, hyper_of(1)), |_| Some(false), changes).expect("a step");
    finish(engine);
    expected.iter_mut().for_each(|one| one.step(widest(), 1, &hyper_of(1)));
    assert_stepped(&mut all, &mut expected, "before");
    draw(&mut all, &mut expected, 2);
    selecting.device.steps_left.store(2, Ordering::Relaxed);
    let failed = submit(engine, &mut all, Some(2.0), (2, hyper_of(2)), |_| Some(false), vec![]);
    assert!(failed.expect_err("it has failed").to_string().contains("out of order"));
    selecting.device.steps_left.store(usize::MAX, Ordering::Relaxed);
    let said = |result: Result<bool, Error>| result.expect_err("it has failed").to_string();
    let later = submit(engine, &mut all, Some(2.0), (3, hyper_of(3)), |_| Some(false), vec![]);
    assert!(said(later.map(|()| true)).contains("out of order"));
    assert!(said(engine.settle(STREAM)).contains("out of order"));
    assert!(said(engine.finish(STREAM, SOON)).contains("out of order"));
    for (one, expected) in all.iter_mut().zip(&mut expected) {
        one.held.set_grad(|at| expected.grad.value(at));
        one.held.assert_same(expected, &format!("{:?}, after the failure", expected.layout));
    }
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let mut all = tensors();
    let mut expected: Vec<Held> = all.iter().map(|one| one.held.moved(0)).collect();
    let selecting = selecting(&mut all, 2, 0.2);
    let engine = &selecting.engine;
    let selectable: Vec<Selectable> = engine.selectable().collect();
    let mut draw_of = Draw::new(9);
    let one = selectable.iter().find(|one| one.tensor == 1).expect("a matrix");
    let good = change_of(&mut draw_of, one);
    draw(&mut all, &mut expected, 1);
    let mut refused = |change: Change, has: &dyn Fn(usize) -> Option<bool>| {
        let error = submit(engine, &mut all, None, (1, hyper_of(1)), has, vec![change]);
        let text = error.expect_err("must be refused").to_string();
        on_device::discard(engine);
        text
    };
    let all_have = |_: usize| Some(false);
    let end = if good.by_columns { one.row_len } else { one.rows };
    let more = Change { indices: (0..end as u32).collect(), ..good.clone() };
    assert!(refused(more, &all_have).contains("room in the memory"));
    let none = Change { indices: Vec::new(), ..good.clone() };
    assert!(refused(none, &all_have).contains("are selected"));
    let mut twice = good.clone();
    twice.indices[1] = twice.indices[0];
    assert!(refused(twice, &all_have).contains("are selected"));
    let mut outside = good.clone();
    *outside.indices.last_mut().expect("one") = end as u32;
    assert!(refused(outside, &all_have).contains("are selected"));
    // It is one row, of which no columns are selected.
    let vector = selectable.iter().find(|one| one.tensor == 6).expect("a vector");
    let columns = Change { segment: vector.segment, by_columns: true, indices: vec![0] };
    assert!(refused(columns, &all_have).contains("are selected"));
    let nowhere = Change { segment: 1000, ..good.clone() };
    assert!(refused(nowhere, &all_have).contains("(1000, "));
    let without = |index: usize| (index != 1).then_some(false);
    assert!(refused(good.clone(), &without).contains("are selected"));
    submit(engine, &mut all, None, (1, hyper_of(1)), all_have, vec![good.clone()]).expect("a step");
    finish(engine);
    let group = engine.next_group(SOON).expect("a step that works").expect("it is over");
    // Its turn, and its tensor is stepped at once.
    let next = selectable.iter().find(|one| one.group == group).expect("two groups");
    let change = change_of(&mut draw_of, next);
    let at_once = |index: usize| Some(index == next.tensor);
    let error = submit(engine, &mut all, Some(2.0), (2, hyper_of(2)), at_once, vec![change]);
    assert!(error.expect_err("must be refused").to_string().contains("whose turn it is"));
    on_device::discard(engine);
    // The turn of another group.
    let other = selectable.iter().find(|one| one.group != group).expect("two groups");
    let change = change_of(&mut draw_of, other);
    let error = submit(engine, &mut all, Some(2.0), (2, hyper_of(2)), all_have, vec![change]);
    assert!(error.expect_err("must be refused").to_string().contains("whose turn it is"));
    // A step without the gradients of what is selected, though nothing is selected anew.
    let mut updates: Vec<Update> = all
        .iter_mut()
        .enumerate()
        .map(|(index, one)| {
            let update = one.update(index, 2, hyper_of(2));
            Update { tensor: without_grad(update.tensor), ..update }
        })
        .collect();
    let work = Work { grads: &[], changes: Vec::new() };
    // SAFETY: the tensors outlive the engine.
    let error = unsafe { engine.submit_with(Some(2.0), &updates, work, &mut None, STREAM) };
    assert!(error.expect_err("must be refused").to_string().contains("grads has `0` entries"));
    // A weight that the device could not write, of a tensor that had nothing selected before.
    let small = selectable.iter().find(|one| one.tensor == 2).expect("a matrix");
    updates[2].weight = None;
    let grads: Vec<u64> =
        all.iter().map(|one| one.grad.as_ptr().expose_provenance() as u64).collect();
    let work = Work { grads: &grads, changes: vec![change_of(&mut draw_of, small)] };
    // SAFETY: as above.
    let error = unsafe { engine.submit_with(None, &updates, work, &mut None, STREAM) };
    let message = error.expect_err("must be refused").to_string();
    assert!(message.contains("tensor `2` has its weight in host memory"), "{message}");
    expected.iter_mut().for_each(|one| one.step(widest(), 1, &hyper_of(1)));
    assert_stepped(&mut all, &mut expected, "refused");
    let numels = [10];
    let sizes = |scope, row_lens: &[usize]| {
        selection_nbytes(&numels, &[Dtype::Float32], 1, row_lens, scope)
    };
    let said = |scope, row_lens: &[usize]| sizes(scope, row_lens).expect_err("refused").to_string();
    assert!(said(Scope::Tensor(1.5), &[5]).contains("fraction is `1.5`"));
    assert!(said(Scope::Tensor(0.5), &[]).contains("row_lens has `0`"));
    assert_eq!(sizes(Scope::Tensor(0.0), &[5]).expect("sizes"), (0, 0));
    assert_eq!(sizes(Scope::Tensor(0.0), &[0]).expect("sizes"), (0, 0));
    // A vector is selected whole, in multiples of 64 bytes.
    assert!(
        said(Scope::Global(127), &[0]).contains("budget_bytes is `127`, expected at least 128")
    );
    assert_eq!(sizes(Scope::Global(1000), &[0]).expect("sizes"), (128, 128));
    // No more than all channels take.
    assert_eq!(sizes(Scope::Global(1000), &[5]).expect("sizes"), (192, 192));
    assert_eq!(sizes(Scope::Global(100), &[5]).expect("sizes"), (64, 64));
}

/// Channels share one budget: what a step that is whole has given a segment is what it has.
#[test]
fn a_budget_is_shared_by_all_until_the_next_step_that_is_whole() {
    let mut all = tensors();
    let mut expected: Vec<Held> = all.iter().map(|one| one.held.moved(0)).collect();
    let selecting = selecting_in(&mut all, 1, Scope::Global(20_000));
    let engine = &selecting.engine;
    let selectable: Vec<Selectable> = engine.selectable().collect();
    let first = |tensor| selectable.iter().find(|one| one.tensor == tensor).expect("it");
    // 12 bytes for each of 77 elements, and 4 for the index.
    let rows = |tensor, count: usize| {
        let indices = (0..count as u32).collect();
        Change { segment: first(tensor).segment, by_columns: false, indices }
    };
    let mut step = |number: u64, deferred, changes: Vec<Change>| {
        draw(&mut all, &mut expected, number);
        let hyper = hyper_of(number);
        let done = submit(engine, &mut all, deferred, (number, hyper), |_| Some(false), changes);
        match &done {
            Ok(()) => expected.iter_mut().for_each(|one| one.step(widest(), number, &hyper)),
            Err(_) => on_device::discard(engine),
        }
        finish(engine);
        done.map_err(|error| error.to_string())
    };
    let full = "room in the memory";
    assert!(step(1, None, vec![rows(1, 22)]).expect_err("too many").contains(full));
    assert!(step(1, None, vec![rows(1, 20), rows(8, 1)]).is_ok());
    // Another has no memory, and as much of this one as was given to it.
    assert!(step(2, Some(1.0), vec![rows(2, 1)]).expect_err("no place").contains(full));
    assert!(step(2, Some(1.0), vec![rows(1, 21)]).expect_err("too many").contains(full));
    assert!(step(2, Some(1.0), vec![rows(1, 19)]).is_ok());
    assert!(step(3, Some(1.0), vec![rows(1, 20)]).is_ok());
    assert!(step(4, None, vec![rows(2, 39)]).is_ok());
    assert!(step(5, Some(1.0), vec![rows(1, 1)]).expect_err("no place").contains(full));
    assert!(step(5, Some(1.0), vec![rows(2, 39)]).is_ok());
    engine.settle(STREAM).expect("a step that works");
    finish(engine);
    assert_stepped(&mut all, &mut expected, "a budget");
}
