//! Which channels may be selected, and a step of theirs, without an engine.

use stepwell::{
    adam::{
        Step,
        selected::{self, ChannelState, Shape as Channels, WeightKind},
    },
    stream::view::View,
};

use super::{battery::is_same, *};

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

const CODECS: [MomentsKind; 2] = [MomentsKind::Bf16, MomentsKind::Q8];

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

/// What a program has written, to some elements of the channels and to others.
#[test]
fn a_weight_that_differs_from_its_rounded_master_becomes_the_master() {
    let kinds = [WeightKind::Float32, WeightKind::Split, WeightKind::Float16, WeightKind::BFloat16];
    for (kind, by_columns) in kinds.into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
        let (rows, row_len) = (37_usize, 1045);
        let mut draw = Draw::new(7);
        let end = if by_columns { row_len } else { rows };
        let indices = some(&mut draw, end.div_ceil(3), end);
        let shape = Channels { rows, row_len, count: indices.len(), by_columns };
        let channels = (&shape, indices.as_slice());
        let floats = || Guarded::zeros(Dtype::Float32, shape.numel(), 0);
        let weights = || Guarded::zeros(kind.dtype(), shape.block_len(), 0);
        let (mut masters, mut others) = (floats(), floats());
        let (mut weight, mut other, mut after) = (weights(), weights(), weights());
        let value = |at: usize| (at as f32 * 0.7).sin() * 1.37_f32;
        let size = kind.dtype().size();
        // SAFETY: all memory is the test's own.
        unsafe {
            for at in 0..shape.numel() {
                masters.view().slice_mut::<f32>(at..at + 1)[0] = value(at);
                others.view().slice_mut::<f32>(at..at + 1)[0] = 3.0 * value(at + 1) + 1e-3;
            }
            selected::write_weights(widest(), channels, kind, masters.view(), weight.view());
            selected::write_weights(widest(), channels, kind, masters.view(), after.view());
            selected::write_weights(widest(), channels, kind, others.view(), other.view());
            for at in (0..shape.block_len()).step_by(5) {
                let [from, to] =
                    [&mut other, &mut weight].map(|one| one.view().address() + at * size);
                let from = std::ptr::with_exposed_provenance::<u8>(from);
                std::ptr::with_exposed_provenance_mut::<u8>(to).copy_from(from, size);
            }
            selected::follow_weights(widest(), channels, kind, masters.view(), weight.view());
        }
        let rounded = after.payload().to_vec();
        // SAFETY: as above.
        unsafe {
            selected::write_weights(widest(), channels, kind, masters.view(), after.view());
        }
        let what = format!("{kind:?}, by columns: {by_columns}");
        for place in 0..shape.numel() {
            let (outer, inner) = (place / shape.inner(), place % shape.inner());
            let at = match by_columns {
                true => outer * row_len + indices[inner] as usize,
                false => indices[outer] as usize * row_len + inner,
            };
            let bytes = at * size..(at + 1) * size;
            let is_written = rounded[bytes.clone()] != weight.payload()[bytes.clone()];
            assert!(after.payload()[bytes.clone()] == weight.payload()[bytes], "{what}: {at}");
            // SAFETY: as above.
            let found = unsafe { masters.view().slice::<f32>(place..place + 1)[0] };
            if !is_written {
                assert!(is_same(found, value(place)), "{what}: {at}");
            } else if kind.dtype() == Dtype::BFloat16 {
                assert!(found.to_bits() & 0xffff == 0, "{what}: {at} is not the weight");
            }
        }
        masters.assert_guards("masters");
        weight.assert_guards("weights");
    }
}
