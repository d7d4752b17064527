//! The order in which the segments of a step are stepped, and with which gradients.

use super::{
    job::{Job, Update},
    segment::Segments,
};
use crate::{
    adam::Step,
    sync::atomic::{AtomicBool, AtomicUsize},
};

/// A segment's turn in a step.
pub(super) struct Turn {
    /// Which update of the job.
    pub(super) update: usize,
    /// Which segment of the engine.
    pub(super) segment: usize,
    /// The generation that it is stepped with.
    pub(super) generation: usize,
    /// The coefficients of the update.
    pub(super) step: Step,
    /// The number of its first chunk within its tensor.
    pub(super) first_chunk: usize,
    /// Chunks of the step before it, and with it.
    pub(super) begin: usize,
    pub(super) end: usize,
    pub(super) chunks_left: AtomicUsize,
    /// Its gradient and its state are there.
    pub(super) is_ready: AtomicBool,
}

impl Turn {
    /// The segment of an update, behind `begin` chunks.
    fn new(
        segments: &Segments,
        (number, update): (usize, &Update),
        segment: usize,
        generation: usize,
        begin: usize,
    ) -> Self {
        let chunks = segments.chunks(update.index, segment);
        Self {
            update: number,
            segment,
            generation,
            step: Step::new(&update.hyper, update.count),
            first_chunk: chunks.start,
            begin,
            end: begin + chunks.len(),
            chunks_left: AtomicUsize::new(chunks.len()),
            is_ready: AtomicBool::new(false),
        }
    }
}

/// Chooses the order.
pub(super) trait Schedule: Send {
    /// Lists the turns of a job in the order in which they are stepped. `turns` is empty, and has
    /// room for every segment.
    fn list(&self, segments: &Segments, job: &Job, turns: &mut Vec<Turn>);
}

/// The order of the call, which is the forward's: the first weights that the next forward reads
/// are the first to be ready.
pub(super) struct Forward;

impl Schedule for Forward {
    fn list(&self, segments: &Segments, job: &Job, turns: &mut Vec<Turn>) {
        for update in job.updates.iter().enumerate() {
            for segment in segments.of(update.1.index) {
                let begin = turns.last().map_or(0, |turn| turn.end);
                turns.push(Turn::new(segments, update, segment, job.generation, begin));
            }
        }
    }
}
