//! Which channels of a matrix matter: those with the largest scores.
//!
//! A score is a squared norm; a larger one comes first, and of equal ones that with the lowest
//! index. -0 and 0 are equal. A NaN comes after all numbers: of a channel that has one nothing is
//! known, and a step with a gradient that is not finite is dropped in any case.
//!
//! Invariants: what is chosen depends on the scores alone. All of it takes linear time: scores
//! become integers of the same order, a selection finds the last one that is chosen, and one scan
//! lists them by index. [`top_k`] takes 8 B per score.

use crate::error::{Error, Result};

/// An integer that is the greater, the earlier a score comes; that of a NaN is 0.
fn rank(score: f64) -> u64 {
    const SIGN: u64 = 1 << 63;
    if score.is_nan() {
        return 0;
    }
    // 0 for both zeros.
    let bits = (score + 0.0).to_bits();
    if bits & SIGN == 0 { bits | SIGN } else { !bits }
}

/// The indices of the `k` largest scores, ascending.
///
/// # Errors
/// [`Error::Value`] for more than there are.
pub fn top_k(scores: &[f64], k: usize) -> Result<Vec<usize>> {
    if k > scores.len() {
        return Err(Error::value(format!(
            "k is `{k}` of {} scores, expected at most all of them",
            scores.len()
        )));
    }
    let Some(after) = k.checked_sub(1) else { return Ok(Vec::new()) };
    let mut ranks: Vec<u64> = scores.iter().map(|&score| rank(score)).collect();
    let (greater, &mut last, _) = ranks.select_nth_unstable_by(after, |a, b| b.cmp(a));
    // Of those that are as large as the last, as many as are left, from the first on.
    let mut equals_left = k - greater.iter().filter(|&&rank| rank > last).count();
    let mut chosen = Vec::with_capacity(k);
    for (index, &score) in scores.iter().enumerate() {
        let rank = rank(score);
        let is_chosen = rank > last || rank == last && equals_left > 0;
        if is_chosen {
            equals_left -= usize::from(rank == last);
            chosen.push(index);
        }
    }
    Ok(chosen)
}

/// Which channels of a matrix are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// Rows, which are contiguous.
    Rows,
    /// Columns.
    Columns,
}

/// Channels that are chosen of a matrix, and what they capture.
#[derive(Clone, Debug, PartialEq)]
pub struct Chosen {
    /// What they are.
    pub axis: Axis,
    /// Their indices, ascending.
    pub channels: Vec<usize>,
    /// Their squared norm.
    pub captured: f64,
    /// That of the whole matrix.
    pub total: f64,
}

/// The rows or the columns with the largest norms, as many as given of each: of the axis whose
/// chosen channels capture more, rows where both capture the same or no column may be chosen.
///
/// # Errors
/// [`Error::Value`] for more than there are.
pub fn choose(
    row_norms: &[f32],
    column_norms: &[f32],
    row_count: usize,
    column_count: usize,
) -> Result<Chosen> {
    let squares = |norms: &[f32]| -> Vec<f64> {
        norms.iter().map(|&norm| f64::from(norm) * f64::from(norm)).collect()
    };
    let [rows, columns] = [squares(row_norms), squares(column_norms)];
    let total = rows.iter().sum();
    let of = |axis, scores: &[f64], count| -> Result<Chosen> {
        let channels = top_k(scores, count)?;
        let captured = channels.iter().map(|&channel| scores[channel]).sum();
        Ok(Chosen { axis, channels, captured, total })
    };
    let by_rows = of(Axis::Rows, &rows, row_count)?;
    let by_columns = of(Axis::Columns, &columns, column_count)?;
    let is_by_columns = row_count == 0 || by_columns.captured > by_rows.captured;
    Ok(if is_by_columns && column_count > 0 { by_columns } else { by_rows })
}
