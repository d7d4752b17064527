//! Squared norm of every row and every column of gradients, in one read.
//!
//! A gradient is taken as a matrix of `rows` runs of `columns` elements each: its leading dimension
//! and all others. A channel is a row or a column.
//!
//! Invariants: a matrix is cut into tiles of [`TILE_ROWS`] by [`TILE_COLUMNS`], from its first
//! element. Sums are in double precision. A row's is taken lane by lane within a tile, then tile by
//! tile in order; a column's row by row within a tile, then tile by tile in order. So they depend
//! on the shape alone, and on neither threads, alignment nor ISA. A sum is finite if all squares
//! and their sum are; a NaN makes its row and its column NaNs.
//!
//! Cost: reads the gradient once. Memory during the call: 8 B for each row of a tile and for each
//! column, which is .04 B per element of a large matrix, and 40 B for each tile. Columns are summed
//! in 8 KiB that stay in the first cache. Rows of less than 16 elements are slow: lanes stay empty.

use std::{
    ops::Range,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{
    error::{Error, Result},
    host::pool::Pool,
    simd::{
        LANES, Simd,
        isa::{Isa, Kernel},
    },
    stream::{
        cursor::Source,
        element::{Bf16, Dtype, Element, F16},
        view::View,
    },
};

/// Rows of a tile.
pub const TILE_ROWS: usize = 256;
/// Columns of a tile.
pub const TILE_COLUMNS: usize = 1024;

/// A gradient as a matrix whose rows are contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix {
    view: View,
    rows: usize,
    columns: usize,
}

impl Matrix {
    /// The gradient as rows of `columns` elements.
    ///
    /// # Errors
    /// [`Error::Value`] for a dtype that gradients do not have, and for elements that are not whole
    /// rows.
    pub fn new(grad: View, columns: usize) -> Result<Self> {
        let numel = grad.numel();
        grad.expect("grad", &[Dtype::Float32, Dtype::BFloat16, Dtype::Float16], numel)?;
        if columns == 0 || !numel.is_multiple_of(columns) {
            return Err(Error::value(format!(
                "columns is `{columns}` for a gradient of {numel} elements, expected a divisor"
            )));
        }
        Ok(Self { view: grad, rows: numel / columns, columns })
    }

    /// Rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.columns
    }
}

/// The squared norms of a matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct ChannelSqNorms {
    /// Of each row.
    pub rows: Vec<f64>,
    /// Of each column.
    pub columns: Vec<f64>,
}

/// A part of a matrix.
#[derive(Clone, Debug)]
struct Tile {
    matrix: usize,
    rows: Range<usize>,
    columns: Range<usize>,
}

/// What the tiles of a matrix have found, as bits: for each tile across the sums of all rows, for
/// each tile down the sums of all columns.
struct Sums {
    rows: Vec<AtomicU64>,
    columns: Vec<AtomicU64>,
}

/// The squared norms of the rows and columns of every matrix.
///
/// # Safety
/// The memory of all matrices is alive, and nothing writes to it during the call.
pub unsafe fn channel_sq_norms(pool: &Pool, isa: Isa, matrices: &[Matrix]) -> Vec<ChannelSqNorms> {
    let zeros = |len: usize| -> Vec<AtomicU64> { (0..len).map(|_| AtomicU64::new(0)).collect() };
    let mut tiles = Vec::new();
    let mut sums = Vec::with_capacity(matrices.len());
    for (index, &Matrix { rows, columns, .. }) in matrices.iter().enumerate() {
        for first_row in (0..rows).step_by(TILE_ROWS) {
            for first_column in (0..columns).step_by(TILE_COLUMNS) {
                tiles.push(Tile {
                    matrix: index,
                    rows: first_row..(first_row + TILE_ROWS).min(rows),
                    columns: first_column..(first_column + TILE_COLUMNS).min(columns),
                });
            }
        }
        sums.push(Sums {
            rows: zeros(rows * columns.div_ceil(TILE_COLUMNS)),
            columns: zeros(columns * rows.div_ceil(TILE_ROWS)),
        });
    }
    pool.run(tiles.len(), &|task| {
        let tile = &tiles[task];
        let Matrix { view, rows, columns } = matrices[tile.matrix];
        let (mut of_rows, mut of_columns) = ([0.0; TILE_ROWS], [0.0; TILE_COLUMNS]);
        let of_rows = &mut of_rows[..tile.rows.len()];
        let of_columns = &mut of_columns[..tile.columns.len()];
        let all = 0..view.numel();
        // SAFETY: the caller vouches for the memory.
        unsafe {
            match view.dtype() {
                Dtype::BFloat16 => {
                    tile.read(isa, view.slice::<Bf16>(all), columns, of_rows, of_columns)
                }
                Dtype::Float16 => {
                    tile.read(isa, view.slice::<F16>(all), columns, of_rows, of_columns)
                }
                _ => tile.read(isa, view.slice::<f32>(all), columns, of_rows, of_columns),
            }
        }
        let across = tile.columns.start / TILE_COLUMNS;
        let down = tile.rows.start / TILE_ROWS;
        let Sums { rows: to_rows, columns: to_columns } = &sums[tile.matrix];
        store(&to_rows[across * rows + tile.rows.start..], of_rows);
        store(&to_columns[down * columns + tile.columns.start..], of_columns);
    });
    let found: Vec<OnceLock<ChannelSqNorms>> = matrices.iter().map(|_| OnceLock::new()).collect();
    pool.run(matrices.len(), &|task| {
        let (of_tiles, matrix) = (&sums[task], &matrices[task]);
        found[task].get_or_init(|| ChannelSqNorms {
            rows: totals(&of_tiles.rows, matrix.rows),
            columns: totals(&of_tiles.columns, matrix.columns),
        });
    });
    found.into_iter().filter_map(OnceLock::into_inner).collect()
}

fn store(to: &[AtomicU64], sums: &[f64]) {
    for (to, sum) in to.iter().zip(sums) {
        to.store(sum.to_bits(), Ordering::Relaxed);
    }
}

/// The sums over the tiles, each of which has `channels` of them, in the order of the tiles.
fn totals(of_tiles: &[AtomicU64], channels: usize) -> Vec<f64> {
    let mut totals = vec![0.0; channels];
    for of_tile in of_tiles.chunks(channels.max(1)) {
        for (total, sum) in totals.iter_mut().zip(of_tile) {
            *total += f64::from_bits(sum.load(Ordering::Relaxed));
        }
    }
    totals
}

impl Tile {
    fn read<G: Element>(
        &self,
        isa: Isa,
        grad: &[G],
        row_len: usize,
        of_rows: &mut [f64],
        of_columns: &mut [f64],
    ) {
        let first = self.rows.start * row_len + self.columns.start;
        isa.run(TileSums { grad: Source::new(grad), first, row_len, of_rows, of_columns });
    }
}

/// Squares of a tile, summed along its rows and down its columns.
struct TileSums<'a, 'b, G> {
    /// The whole matrix.
    grad: Source<'a, G>,
    /// Where the tile begins in it.
    first: usize,
    /// Elements from a row to the next.
    row_len: usize,
    of_rows: &'b mut [f64],
    of_columns: &'b mut [f64],
}

/// Rows that are read side by side: memory answers more requests than one sequence keeps in flight,
/// and the columns' sums are loaded and stored once for all of them.
const ROWS_AT_ONCE: usize = 4;

/// The columns' sums of a tile.
type Down<S> = [<S as Simd>::D; TILE_COLUMNS / LANES];

impl<G: Element> TileSums<'_, '_, G> {
    /// The sums along the `R` rows of the tile from `row` on.
    #[inline(always)]
    fn rows<S: Simd, const R: usize>(&self, simd: S, row: usize, down: &mut Down<S>) -> [f64; R] {
        let Self { grad, first, row_len, .. } = self;
        let begin = first + row * row_len;
        let columns = self.of_columns.len();
        let whole = columns / LANES * LANES;
        let mut along = [simd.zero_sums(); R];
        let mut at = 0;
        while at < columns {
            let count = if at < whole { LANES } else { columns - whole };
            let mut sums = down[at / LANES];
            for (number, along) in along.iter_mut().enumerate() {
                let at = begin + number * row_len + at;
                grad.prefetch(at, LANES);
                let values = G::widen(simd, grad.load(simd, at, count));
                *along = simd.add_squares(*along, values);
                sums = simd.add_squares(sums, values);
            }
            down[at / LANES] = sums;
            at += LANES;
        }
        let mut of_rows = [0.0; R];
        for (of_row, along) in of_rows.iter_mut().zip(along) {
            *of_row = simd.sums(along).into_iter().sum();
        }
        of_rows
    }
}

impl<G: Element> Kernel for TileSums<'_, '_, G> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mut down: Down<S> = [simd.zero_sums(); TILE_COLUMNS / LANES];
        let rows = self.of_rows.len();
        let mut row = 0;
        while row + ROWS_AT_ONCE <= rows {
            let sums = self.rows::<S, ROWS_AT_ONCE>(simd, row, &mut down);
            self.of_rows[row..row + ROWS_AT_ONCE].copy_from_slice(&sums);
            row += ROWS_AT_ONCE;
        }
        while row < rows {
            [self.of_rows[row]] = self.rows::<S, 1>(simd, row, &mut down);
            row += 1;
        }
        for (of_columns, down) in self.of_columns.chunks_mut(LANES).zip(down) {
            let lanes = simd.sums(down);
            of_columns.copy_from_slice(&lanes[..of_columns.len()]);
        }
    }
}
