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
        top_k::top_k,
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
}

#[test]
fn what_cannot_be_chosen_is_refused() {
    let said = message(top_k(&[1.0, 2.0], 3));
    assert!(said.contains("`3`") && said.contains('2'), "{said}");
}
