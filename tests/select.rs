//! Channels of gradients: their squared norms bit for bit in the stated order of summation, however
//! the work is shared out, and what is chosen of them against a sort.

mod battery;

use std::cmp::Ordering;

use battery::{
    Draw, Guarded, Spread, cases, flushing_subnormals, is_hurried, pool, pool_of, widest,
};
use proptest::prelude::*;
use stepwell::{
    Error, Result,
    grads::{
        channels::{ChannelSqNorms, Matrix, TILE_COLUMNS, TILE_ROWS, channel_sq_norms},
        top_k::{Axis, Channels, better_axis, captured, top_k, top_k_within},
    },
    host::pool::Pool,
    simd::{LANES, isa::Isa},
    stream::{element::Dtype, view::View},
};

const GRADS: [Dtype; 3] = [Dtype::Float32, Dtype::BFloat16, Dtype::Float16];
/// Roundings of at most 2^9 additions of numbers of one sign.
const SUM_ERROR: f64 = 1.2e-13;

fn grad(dtype: Dtype, values: &[f32], offset: usize) -> Guarded {
    let mut grad = Guarded::zeros(dtype, values.len(), offset);
    for (index, value) in values.iter().enumerate() {
        grad.set_value(index, *value);
    }
    grad
}

fn measure(pool: &Pool, isa: Isa, grads: &mut [(Guarded, usize)]) -> Vec<ChannelSqNorms> {
    let matrix = |(grad, columns): &mut (Guarded, usize)| {
        Matrix::new(grad.view(), *columns).expect("a matrix")
    };
    let matrices: Vec<Matrix> = grads.iter_mut().map(matrix).collect();
    // SAFETY: the views are of memory that the caller lends.
    unsafe { channel_sq_norms(pool, isa, &matrices) }
}

/// The sums in the order that the module states.
fn in_order(grad: &Guarded, columns: usize) -> ChannelSqNorms {
    let rows = grad.numel() / columns;
    let squares: Vec<f64> = grad.values().iter().map(|&value| f64::from(value).powi(2)).collect();
    let mut found = ChannelSqNorms { rows: vec![0.0; rows], columns: vec![0.0; columns] };
    for (row, total) in found.rows.iter_mut().enumerate() {
        for tile in squares[row * columns..(row + 1) * columns].chunks(TILE_COLUMNS) {
            let mut lanes = [0.0; LANES];
            for (at, square) in tile.iter().enumerate() {
                lanes[at % LANES] += square;
            }
            *total += lanes.into_iter().sum::<f64>();
        }
    }
    for (column, total) in found.columns.iter_mut().enumerate() {
        for first in (0..rows).step_by(TILE_ROWS) {
            let tile = first..(first + TILE_ROWS).min(rows);
            *total += tile.fold(0.0, |sum, row| sum + squares[row * columns + column]);
        }
    }
    found
}

/// The bits, with one for all NaNs.
fn bits(found: &ChannelSqNorms) -> Vec<u64> {
    let one = |sum: &f64| if sum.is_nan() { f64::NAN.to_bits() } else { sum.to_bits() };
    found.rows.iter().chain(&found.columns).map(one).collect()
}

/// Numbers of rows and of columns around everything that the kernel counts by.
fn shapes() -> impl Strategy<Value = (usize, usize)> {
    let around = |at: usize| at - 1..=at + 1;
    prop_oneof![
        4 => (0_usize..40, 1_usize..70),
        1 => (around(TILE_ROWS), 1_usize..20),
        1 => (around(2 * TILE_ROWS), 1_usize..5),
        1 => (1_usize..5, around(TILE_COLUMNS)),
        1 => (1_usize..3, around(2 * TILE_COLUMNS)),
    ]
}

proptest! {
    #![proptest_config(cases(192))]

    #[test]
    fn sums_are_those_of_the_stated_order(
        (rows, columns) in shapes(),
        offset in 0_usize..64,
        spread in Spread::any(),
        seed: u64,
    ) {
        let values = Draw::new(seed).values(spread, rows * columns);
        for dtype in GRADS {
            let aligned = grad(dtype, &values, 0);
            let expected = bits(&in_order(&aligned, columns));
            for isa in Isa::available() {
                let mut grads = [(aligned.moved(offset), columns)];
                let found = measure(pool(), isa, &mut grads);
                grads[0].0.assert_guards("grad");
                prop_assert_eq!(&bits(&found[0]), &expected, "{} on {}", dtype, isa.name());
            }
        }
    }
}

/// Several gradients on pools of every size.
#[test]
fn threads_do_not_show() {
    let shapes =
        if is_hurried() { [(3, 70), (0, 5), (300, 1)] } else { [(700, 1500), (0, 5), (2000, 33)] };
    let mut draw = Draw::new(4);
    let mut grads: Vec<(Guarded, usize)> = shapes
        .into_iter()
        .zip(GRADS)
        .map(|((rows, columns), dtype)| {
            (grad(dtype, &draw.values(Spread::Ordinary, rows * columns), rows % 7), columns)
        })
        .collect();
    let expected: Vec<_> =
        grads.iter().map(|(grad, columns)| bits(&in_order(grad, *columns))).collect();
    for threads in [1, 2, 3, 7] {
        let found = measure(&pool_of(threads), widest(), &mut grads);
        assert_eq!(found.iter().map(bits).collect::<Vec<_>>(), expected, "{threads} threads");
    }
    flushing_subnormals(|| {
        let found = measure(&pool_of(2), widest(), &mut grads);
        assert_eq!(found.iter().map(bits).collect::<Vec<_>>(), expected);
    });
}

/// A value that is not finite is in its row and in its column, and nowhere else.
#[test]
fn one_bad_value_is_in_its_channels() {
    let (rows, columns) = (5, 40);
    for (row, column) in [(0, 0), (4, 39), (2, 17), (3, 32)] {
        for bad in [f32::INFINITY, f32::NAN] {
            let mut values = vec![1.0; rows * columns];
            values[row * columns + column] = bad;
            for dtype in GRADS {
                let mut grads = [(grad(dtype, &values, 0), columns)];
                let found = &measure(pool(), widest(), &mut grads)[0];
                let is_bad = |sum: f64| {
                    if bad.is_nan() { sum.is_nan() } else { sum == f64::INFINITY }
                };
                for (index, &sum) in found.rows.iter().enumerate() {
                    assert!(if index == row { is_bad(sum) } else { sum == columns as f64 });
                }
                for (index, &sum) in found.columns.iter().enumerate() {
                    assert!(if index == column { is_bad(sum) } else { sum == rows as f64 });
                }
            }
        }
    }
}

fn message<T: std::fmt::Debug>(refused: Result<T>) -> String {
    match refused {
        Err(Error::Value(message)) => message,
        other => panic!("{other:?}, expected a refusal"),
    }
}

#[test]
fn what_is_no_matrix_is_refused() {
    let mut memory = Guarded::zeros(Dtype::Float32, 12, 0);
    for columns in [0, 5, 13] {
        let said = message(Matrix::new(memory.view(), columns));
        assert!(said.contains(&format!("`{columns}`")) && said.contains("12"), "{said}");
    }
    for dtype in Dtype::ALL.into_iter().filter(|dtype| !GRADS.contains(dtype)) {
        let mut memory = Guarded::zeros(dtype, 4, 0);
        let view: View = memory.view();
        assert!(message(Matrix::new(view, 2)).contains(dtype.name()));
    }
}

/// Scores with ties, zeros of both signs, infinities and NaNs among them.
fn scores() -> impl Strategy<Value = Vec<f64>> {
    let score = prop_oneof![
        4 => (0_i32..6).prop_map(f64::from),
        4 => 0.0_f64..1e3,
        1 => prop::sample::select(
            vec![0.0, -0.0, f64::INFINITY, f64::NAN, -f64::NAN, 1e-320, f64::MAX, -1.0]
        ),
    ];
    prop::collection::vec(score, 0..60)
}

/// Which of two scores comes first.
fn by_score(a: f64, b: f64) -> Ordering {
    match (a.is_nan(), b.is_nan()) {
        (false, false) => b.partial_cmp(&a).expect("numbers"),
        (a, b) => a.cmp(&b),
    }
}

/// All indices, those that come first in front.
fn sorted(scores: &[f64]) -> Vec<usize> {
    let mut indices: Vec<usize> = (0..scores.len()).collect();
    indices.sort_by(|&a, &b| by_score(scores[a], scores[b]).then(a.cmp(&b)));
    indices
}

proptest! {
    #![proptest_config(cases(1024))]

    #[test]
    fn the_largest_are_those_of_a_sort(scores in scores()) {
        let order = sorted(&scores);
        for k in 0..=scores.len() {
            let mut expected = order[..k].to_vec();
            expected.sort_unstable();
            prop_assert_eq!(top_k(&scores, k).expect("at most all"), expected, "k = {}", k);
        }
    }

    #[test]
    fn within_a_budget_are_those_of_a_sort_until_one_does_not_fit(
        tensors in prop::collection::vec((scores(), 1_u64..9), 0..6),
        budget in 0.0_f64..1.2,
    ) {
        let total: u64 =
            tensors.iter().map(|(scores, bytes)| scores.len() as u64 * bytes).sum();
        let budget = (budget * total as f64) as u64;
        let mut all: Vec<(f64, usize, usize)> = Vec::new();
        for (tensor, (scores, bytes)) in tensors.iter().enumerate() {
            let per_byte = |score: &f64| score / *bytes as f64;
            all.extend(
                scores.iter().enumerate().map(|(index, score)| (per_byte(score), tensor, index)),
            );
        }
        all.sort_by(|a, b| by_score(a.0, b.0).then((a.1, a.2).cmp(&(b.1, b.2))));
        let (mut left, mut expected) = (budget, vec![Vec::new(); tensors.len()]);
        for (_, tensor, index) in all {
            let Some(rest) = left.checked_sub(tensors[tensor].1) else { break };
            left = rest;
            expected[tensor].push(index);
        }
        expected.iter_mut().for_each(|chosen| chosen.sort_unstable());
        let channels: Vec<Channels<'_>> = tensors
            .iter()
            .map(|(scores, bytes)| Channels { scores, channel_bytes: *bytes })
            .collect();
        prop_assert_eq!(top_k_within(&channels, budget).expect("costs"), expected);
    }

    #[test]
    fn what_a_share_captures_is_what_the_largest_have(scores in scores(), share in 0.0_f64..=1.0) {
        let known: Vec<f64> = scores.into_iter().map(|score| score.abs().min(1e6)).collect();
        let order = sorted(&known);
        let channels = share * known.len() as f64;
        let whole = channels.floor() as usize;
        let sum: f64 = order[..whole].iter().map(|&index| known[index]).sum();
        let next = order.get(whole).map_or(0.0, |&index| known[index]);
        let expected = sum + (channels - channels.floor()) * next;
        let got = captured(&known, share).expect("a share");
        let error = (got - expected).abs();
        prop_assert!(error <= SUM_ERROR * expected, "{} against {}", got, expected);
    }
}

#[test]
fn a_share_of_less_than_a_channel_is_exact() {
    let share = 2.343_436_461_737_425_6e-6;
    assert_eq!(captured(&[0.0, 8.0], share).expect("a share"), 2.0 * share * 8.0);
}

#[test]
fn a_nan_captures_nothing_and_infinities_all() {
    assert_eq!(captured(&[f64::NAN, 1.0, 2.0], 1.0).expect("a share"), 3.0);
    assert_eq!(captured(&[f64::NAN; 3], 0.5).expect("a share"), 0.0);
    assert_eq!(captured(&[1.0, f64::INFINITY, 2.0], 0.1).expect("a share"), f64::INFINITY);
    assert_eq!(captured(&[], 0.5).expect("a share"), 0.0);
}

/// Norms in few rows, in few columns, and spread out.
#[test]
fn the_axis_that_captures_more_is_chosen() {
    let (few, even) = ([9.0, 1.0, 1.0, 1.0], [3.0; 4]);
    let axis = |rows: &[f64], columns: &[f64]| better_axis(rows, columns, 0.25).expect("a share");
    assert_eq!(axis(&few, &even), Axis::Rows);
    assert_eq!(axis(&even, &few), Axis::Columns);
    assert_eq!(axis(&even, &even), Axis::Rows, "rows where both capture the same");
    // A quarter of six rows is one and a half: 4 and half of 2, where one row alone would lose.
    assert_eq!(axis(&[4.0, 2.0, 2.0, 2.0, 1.0, 1.0], &[4.5, 2.5, 2.5, 2.5]), Axis::Rows);
}

#[test]
fn what_cannot_be_chosen_is_refused() {
    let said = message(top_k(&[1.0, 2.0], 3));
    assert!(said.contains("`3`") && said.contains('2'), "{said}");
    let scores = [1.0];
    let free = [
        Channels { scores: &scores, channel_bytes: 1 },
        Channels { scores: &scores, channel_bytes: 0 },
    ];
    assert!(message(top_k_within(&free, 1)).contains("channel_bytes[1] is `0`"));
    for share in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
        assert!(message(captured(&scores, share)).contains("share"));
        assert!(message(better_axis(&scores, &scores, share)).contains("share"));
    }
    // Costs whose sum is more than any number of bytes.
    let large = [Channels { scores: &[1.0, 2.0, 3.0], channel_bytes: u64::MAX / 2 }];
    assert_eq!(top_k_within(&large, u64::MAX).expect("costs"), [vec![1, 2]]);
}
