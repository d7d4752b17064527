//! Which segments have their turn in a job, and in which order they are stepped.

use super::{groups::Groups, job::Job, pending::Pending, segment::Segments};
use crate::sync::atomic::{AtomicBool, AtomicUsize};

/// A segment's turn in a job: all its gradients that are pending are applied.
pub(super) struct Turn {
    /// Which tensor of the engine.
    pub(super) tensor: usize,
    /// Which segment of the engine.
    pub(super) segment: usize,
    /// Whether its weight lands with this job.
    pub(super) lands_now: bool,
    /// The number of its first chunk within its tensor.
    pub(super) first_chunk: usize,
    /// Chunks of the job before it, and with it.
    pub(super) begin: usize,
    pub(super) end: usize,
    pub(super) chunks_left: AtomicUsize,
    /// Its gradients and its state are there.
    pub(super) is_ready: AtomicBool,
}

/// Adds the turn of a segment, where it has a gradient.
fn push(
    turns: &mut Vec<Turn>,
    segments: &Segments,
    pending: &Pending,
    (tensor, segment): (usize, usize),
    lands_now: bool,
) {
    if !pending.is_pending(segment) {
        return;
    }
    let begin = turns.last().map_or(0, |turn| turn.end);
    let chunks = segments.chunks(tensor, segment);
    turns.push(Turn {
        tensor,
        segment,
        lands_now,
        first_chunk: chunks.start,
        begin,
        end: begin + chunks.len(),
        chunks_left: AtomicUsize::new(chunks.len()),
        is_ready: AtomicBool::new(false),
    });
}

/// Lists the turns of a job that steps all that is pending, in the order of the call, which is the
/// forward's: the first weights that the next forward reads are the first to be ready. What is
/// pending of other tensors comes last. `turns` is empty, and has room for every segment.
pub(super) fn list_all(segments: &Segments, job: &Job, pending: &Pending, turns: &mut Vec<Turn>) {
    let others = (0..segments.tensors()).filter(|&tensor| !pending.is_in_job(tensor));
    for tensor in job.updates.iter().map(|update| update.index).chain(others) {
        for segment in segments.of(tensor) {
            push(turns, segments, pending, (tensor, segment), true);
        }
    }
}

/// Lists the turns of a deferred job: of what is stepped at once, which the next forward waits for,
/// then of the group whose turn it is. Each in forward order.
pub(super) fn list_group(
    segments: &Segments,
    groups: &Groups,
    job: &Job,
    pending: &Pending,
    turns: &mut Vec<Turn>,
) {
    for update in job.updates.iter().filter(|update| update.is_at_once) {
        for segment in segments.of(update.index) {
            push(turns, segments, pending, (update.index, segment), true);
        }
    }
    let group = pending.turn() % groups.count();
    for tensor in 0..segments.tensors() {
        let is_listed = pending.is_in_job(tensor)
            && pending.update(tensor).is_some_and(|update| update.is_at_once);
        for segment in segments.of(tensor).filter(|_| !is_listed) {
            if groups.of(segment) == group {
                push(turns, segments, pending, (tensor, segment), false);
            }
        }
    }
}
