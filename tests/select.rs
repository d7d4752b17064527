//! Which channels are chosen by their scores, against a sort.

mod battery;

use std::cmp::Ordering;

use battery::cases;
use proptest::prelude::*;
use stepwell::grads::top_k::top_k;

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
    let said = top_k(&[1.0, 2.0], 3).expect_err("must be refused").to_string();
    assert!(said.contains("`3`") && said.contains('2'), "{said}");
}
