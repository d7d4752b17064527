//! Which channels of a whole model are worth the device memory for their state.
//!
//! Of each matrix rows or columns may be selected: of the axis that captures more of its squared
//! norm at the share that the budget is of all state. Then all channels of all matrices compete, by
//! what they capture per byte. So a matrix with a few large channels gets more of the budget than
//! one whose channels are alike.
//!
//! Linear in the channels; takes some 50 B for each.

use super::{Selectable, selection::ALIGN_BYTES};
use crate::{
    error::{Error, Result},
    grads::top_k::{Axis, Channels, Chosen, better_axis, top_k_within},
};

/// What is selected of a matrix, and how many channels of either axis its memory holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Granted {
    /// What begins now.
    pub chosen: Chosen,
    /// Rows that may be selected later, until the budget is granted anew.
    pub row_count: usize,
    /// Columns that may be.
    pub column_count: usize,
}

/// The channels of all matrices that capture most squared norm per byte of state.
///
/// # Errors
/// [`Error::Value`] for norms of another number.
pub fn grant(
    matrices: &[Selectable],
    norms: &[(&[f32], &[f32])],
    budget_bytes: usize,
) -> Result<Vec<Granted>> {
    if matrices.len() != norms.len() {
        return Err(Error::value(format!(
            "norms has `{}` entries, expected one for each of {} matrices",
            norms.len(),
            matrices.len()
        )));
    }
    let squares = |norms: &[f32]| -> Vec<f64> {
        norms.iter().map(|&norm| f64::from(norm) * f64::from(norm)).collect()
    };
    let bytes_of = |one: &Selectable, by_columns| one.shape_of(by_columns, 1).nbytes();
    let all_bytes: usize =
        matrices.iter().map(|one| one.rows * bytes_of(one, false)).sum::<usize>().max(1);
    let share = (budget_bytes as f64 / all_bytes as f64).min(1.0);
    let mut by_columns = Vec::with_capacity(matrices.len());
    let mut scores = Vec::with_capacity(matrices.len());
    for (row_norms, column_norms) in norms {
        let [rows, columns] = [squares(row_norms), squares(column_norms)];
        let is_by_columns = better_axis(&rows, &columns, share)? == Axis::Columns;
        by_columns.push(is_by_columns);
        scores.push(if is_by_columns { columns } else { rows });
    }
    let channels: Vec<_> = matrices
        .iter()
        .zip(scores.iter().zip(&by_columns))
        .map(|(one, (scores, &by_columns))| Channels {
            scores,
            channel_bytes: bytes_of(one, by_columns) as u64,
        })
        .collect();
    let place_of = |one: &Channels<'_>| -> usize {
        (one.scores.len() * one.channel_bytes as usize).next_multiple_of(ALIGN_BYTES)
    };
    let places: usize = channels.iter().map(place_of).sum();
    let usable = if places <= budget_bytes {
        places
    } else {
        // Of every matrix's place the end may be unused.
        budget_bytes.saturating_sub(matrices.len() * (ALIGN_BYTES - 1))
    };
    let chosen = top_k_within(&channels, usable as u64)?;
    let granted = chosen.into_iter().enumerate().map(|(index, channels)| {
        let (one, scores, by_columns) = (&matrices[index], &scores[index], by_columns[index]);
        let nbytes = one.shape_of(by_columns, channels.len()).nbytes();
        let held = |by_columns| nbytes / bytes_of(one, by_columns);
        let captured = channels.iter().map(|&channel| scores[channel]).sum();
        let axis = if by_columns { Axis::Columns } else { Axis::Rows };
        Granted {
            chosen: Chosen { axis, channels, captured, total: scores.iter().sum() },
            row_count: held(false).min(one.rows),
            column_count: held(true).min(one.row_len),
        }
    });
    Ok(granted.collect())
}
