//! Which channels of several matrices share a budget: the axis of each, the bytes that are lost to
//! aligned places, and what is chosen, against a sort.

mod battery;

use std::cmp::Reverse;

use battery::cases;
use proptest::prelude::*;
use stepwell::{
    Error,
    grads::top_k::{Axis, Chosen},
    offload::{Granted, Selectable, grant},
};

/// Of every matrix's place.
const ALIGN_BYTES: usize = 64;

fn matrix((rows, row_len): (usize, usize)) -> Selectable {
    let (row_count, column_count) = (rows, row_len);
    Selectable {
        tensor: 0,
        segment: 0,
        group: 0,
        first: 0,
        rows,
        row_len,
        row_count,
        column_count,
        nbytes: 0,
    }
}

/// Master, moments, and an index.
fn channel_nbytes((rows, row_len): (usize, usize), axis: Axis) -> usize {
    12 * if axis == Axis::Columns { rows } else { row_len } + 4
}

/// One row has most of the norm, and a quarter of the columns none: rows capture more up to a share
/// of two thirds. Rows take 196 bytes, 784 all of them and 832 with their place; columns take 52.
#[test]
fn what_a_matrix_is_granted_follows_its_norms_and_the_budget() {
    let mut column_norms = [1.0; 16];
    column_norms[12..].fill(0.0);
    let granted = |budget_bytes| {
        let norms: [(&[f32], &[f32]); 1] = [(&[3.0, 1.0, 1.0, 1.0], &column_norms)];
        let granted = grant(&[matrix((4, 16))], &norms, budget_bytes).expect("norms of it");
        <[Granted; 1]>::try_from(granted).expect("one")
    };
    let expected = |axis, count, captured, row_count, column_count| {
        let channels = (0..count).collect();
        let chosen = Chosen { axis, channels, captured, total: 12.0 };
        [Granted { chosen, row_count, column_count }]
    };
    assert_eq!(granted(0), expected(Axis::Rows, 0, 0.0, 0, 0));
    // Two rows, where 63 bytes may be lost at the end of their place.
    assert_eq!(granted(454), expected(Axis::Rows, 1, 9.0, 1, 3));
    assert_eq!(granted(455), expected(Axis::Rows, 2, 10.0, 2, 7));
    assert_eq!(granted(522), expected(Axis::Rows, 2, 10.0, 2, 7));
    assert_eq!(granted(523), expected(Axis::Columns, 8, 8.0, 2, 8));
    assert_eq!(granted(831), expected(Axis::Rows, 3, 11.0, 3, 11));
    // All have room: no byte is lost.
    for budget_bytes in [832, 833, usize::MAX / 2] {
        assert_eq!(granted(budget_bytes), expected(Axis::Rows, 4, 12.0, 4, 15));
    }
}

#[test]
fn norms_of_another_number_are_refused() {
    let refused = grant(&[matrix((1, 1)), matrix((2, 2))], &[(&[1.0], &[1.0])], 1000);
    let Err(Error::Value(message)) = refused else { panic!("{refused:?}, expected a refusal") };
    assert!(message.contains("norms has `1` entries, expected one for each of 2"), "{message}");
    assert_eq!(grant(&[], &[], 1000).expect("nothing"), []);
}

/// Rows and elements of a row, and the norms of the rows and of the columns.
type Normed = ((usize, usize), Vec<f32>, Vec<f32>);

/// Matrices with norms of small integers: their squares are exact, some are equal and some 0.
fn matrices() -> impl Strategy<Value = Vec<Normed>> {
    let norms = |count| prop::collection::vec((0_u8..9).prop_map(f32::from), count);
    let one = (1_usize..40, 1_usize..40)
        .prop_flat_map(move |(rows, row_len)| (Just((rows, row_len)), norms(rows), norms(row_len)));
    prop::collection::vec(one, 0..6)
}

proptest! {
    #![proptest_config(cases(1024))]

    #[test]
    fn what_is_granted_is_what_a_sort_finds(all in matrices(), budget in 0.0_f64..1.3) {
        let selectable: Vec<Selectable> = all.iter().map(|(shape, ..)| matrix(*shape)).collect();
        let norms: Vec<(&[f32], &[f32])> =
            all.iter().map(|(_, rows, columns)| (&rows[..], &columns[..])).collect();
        let of_rows = |&(rows, row_len)| rows * channel_nbytes((rows, row_len), Axis::Rows);
        let total: usize = all.iter().map(|(shape, ..)| of_rows(shape)).sum();
        let budget_bytes = (budget * total as f64) as usize;
        let found = grant(&selectable, &norms, budget_bytes).expect("norms of each");
        prop_assert_eq!(found.len(), all.len());
        let (mut ranked, mut places) = (Vec::new(), 0);
        for (index, ((shape, rows, columns), found)) in all.iter().zip(&found).enumerate() {
            let axis = found.chosen.axis;
            let nbytes = channel_nbytes(*shape, axis);
            let scores = if axis == Axis::Columns { columns } else { rows };
            places += (scores.len() * nbytes).next_multiple_of(ALIGN_BYTES);
            for (channel, &norm) in scores.iter().enumerate() {
                let score = f64::from(norm).powi(2);
                ranked.push((score / nbytes as f64, Reverse((index, channel)), score, nbytes));
            }
        }
        let lost = if places <= budget_bytes { 0 } else { all.len() * (ALIGN_BYTES - 1) };
        let mut left = budget_bytes.saturating_sub(lost);
        let mut expected = vec![(Vec::new(), 0.0, 0); all.len()];
        ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
        for (_, Reverse((index, channel)), score, nbytes) in ranked {
            let Some(rest) = left.checked_sub(nbytes) else { break };
            left = rest;
            let (channels, captured, taken) = &mut expected[index];
            channels.push(channel);
            *captured += score;
            *taken += nbytes;
        }
        for (((shape, ..), found), (mut channels, captured, taken)) in
            all.iter().zip(found).zip(expected)
        {
            channels.sort_unstable();
            prop_assert_eq!(found.chosen.channels, channels);
            prop_assert_eq!(found.chosen.captured, captured);
            prop_assert_eq!(found.row_count, taken / channel_nbytes(*shape, Axis::Rows));
            prop_assert_eq!(found.column_count, taken / channel_nbytes(*shape, Axis::Columns));
        }
    }
}
