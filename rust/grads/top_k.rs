//! Which channels matter: those with the largest scores, of a tensor or of a whole model.
//!
//! A score is a squared norm; a larger one comes first, and of equal ones that with the lowest
//! index. -0 and 0 are equal. A NaN comes after all numbers: of a channel that has one nothing is
//! known, and a step with a gradient that is not finite is dropped in any case.
//!
//! Invariants: what is chosen depends on the scores alone. All of it takes linear time: scores
//! become integers of the same order, a selection finds the last one that is chosen, and one scan
//! lists them by index. [`top_k`] takes 8 B per score, [`top_k_within`] 24.

use std::cmp::Reverse;

use crate::error::{Error, Result};

/// A channel of a model, with its tensor and its index, in an order in which the greatest is chosen
/// first.
type Ranked = (u64, Reverse<(usize, usize)>);

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

/// The channels of one tensor: their scores, and what choosing one costs.
#[derive(Clone, Copy, Debug)]
pub struct Channels<'a> {
    /// A score for each channel.
    pub scores: &'a [f64],
    /// Bytes that each chosen channel takes.
    pub channel_bytes: u64,
}

/// For each tensor the indices, ascending, of the channels that capture most per byte within a
/// budget: channels are taken by their score per byte, of equal ones first those of the first
/// tensor, until one does not fit. So what is left of the budget is less than one channel, and a
/// larger budget chooses the same channels and more.
///
/// # Errors
/// [`Error::Value`] for channels of no bytes.
pub fn top_k_within(tensors: &[Channels<'_>], budget_bytes: u64) -> Result<Vec<Vec<usize>>> {
    if let Some(index) = tensors.iter().position(|tensor| tensor.channel_bytes == 0) {
        return Err(Error::value(format!(
            "channel_bytes[{index}] is `0`, expected at least 1: all channels of that tensor would \
             be chosen"
        )));
    }
    let ranked = |index: usize, tensor: &Channels<'_>, channel: usize| -> Ranked {
        let per_byte = tensor.scores[channel] / tensor.channel_bytes as f64;
        (rank(per_byte), Reverse((index, channel)))
    };
    let mut all = Vec::with_capacity(tensors.iter().map(|tensor| tensor.scores.len()).sum());
    for (index, tensor) in tensors.iter().enumerate() {
        all.extend((0..tensor.scores.len()).map(|channel| ranked(index, tensor, channel)));
    }
    let bytes = |&(_, Reverse((index, _))): &Ranked| tensors[index].channel_bytes;
    let first_out = first_beyond(&mut all, bytes, budget_bytes);
    let chosen_of = |(index, tensor): (usize, &Channels<'_>)| {
        let is_chosen = |&channel: &usize| {
            first_out.is_none_or(|first_out| ranked(index, tensor, channel) > first_out)
        };
        (0..tensor.scores.len()).filter(is_chosen).collect()
    };
    Ok(tensors.iter().enumerate().map(chosen_of).collect())
}

/// The first that no longer fits when they are taken from the greatest on; none if all do. Halves
/// what is left each time, so it is linear.
fn first_beyond(
    mut left: &mut [Ranked],
    bytes: impl Fn(&Ranked) -> u64,
    mut budget_bytes: u64,
) -> Option<Ranked> {
    while !left.is_empty() {
        let middle = (left.len() - 1) / 2;
        left.select_nth_unstable_by(middle, |a, b| b.cmp(a));
        let (greater, rest) = left.split_at_mut(middle + 1);
        let needed = greater
            .iter()
            .try_fold(0_u64, |sum, ranked| sum.checked_add(bytes(ranked)))
            .filter(|&needed| needed <= budget_bytes);
        match needed {
            Some(needed) => {
                budget_bytes -= needed;
                left = rest;
            }
            None if middle == 0 => return Some(greater[0]),
            // The middle one stays: it may be the first that does not fit.
            None => left = greater,
        }
    }
    None
}

/// Which channels of a matrix are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// Rows, which are contiguous.
    Rows,
    /// Columns.
    Columns,
}

/// The squared norm that the largest `share` of the scores capture. Where that is no whole number
/// of channels, the next one counts with the part that is left, so that rows and columns of any
/// number can be compared. A NaN counts as 0.
///
/// # Errors
/// [`Error::Value`] for a share that is not from 0 to 1.
pub fn captured(scores: &[f64], share: f64) -> Result<f64> {
    if !(0.0..=1.0).contains(&share) {
        return Err(Error::value(format!("share is `{share}`, expected 0 to 1")));
    }
    let channels = share * scores.len() as f64;
    let chosen = top_k(scores, channels.ceil() as usize)?;
    // The last of them is in part behind the share.
    let last = chosen.iter().copied().min_by_key(|&index| (rank(scores[index]), Reverse(index)));
    let part_of_last = channels - (channels.ceil() - 1.0);
    let part = |index| if Some(index) == last { part_of_last } else { 1.0 };
    let known = chosen.into_iter().filter(|&index| !scores[index].is_nan());
    Ok(known.map(|index| part(index) * scores[index]).sum())
}

/// The axis whose channels capture more of a matrix at the same share; rows where both capture the
/// same.
///
/// # Errors
/// As [`captured`].
pub fn better_axis(rows: &[f64], columns: &[f64], share: f64) -> Result<Axis> {
    let [rows, columns] = [captured(rows, share)?, captured(columns, share)?];
    Ok(if columns > rows { Axis::Columns } else { Axis::Rows })
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
