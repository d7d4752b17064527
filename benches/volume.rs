//! How fast a volume moves records: raw, without a step between.
//!
//! ```text
//! cargo bench --bench volume -- FOLDER... [--weights 400,400,200] [--record-kib 644]
//!     [--records 512] [--buffers 32] [--depth 32] [--stripe-kib 1024] [--seconds 5]
//!     [--engine auto|io_uring|positional] [--durability none|commit]
//! ```
//!
//! Each folder is a member. Without folders, a few records move in a temporary one: then it is only
//! tried that it works. Rows are of what moves at once:
//!
//! | row | what is in flight |
//! |---|---|
//! | write | writes of one record after the other, again and again; a commit after the last one |
//! | read | reads |
//! | swap | as a step does: a record is read, and written when it is there |
//!
//! MB are 10^6 bytes, with trailers and padding. A row ends when all that was begun has ended.

use std::{
    collections::VecDeque,
    error::Error,
    io::Write,
    path::PathBuf,
    time::{Duration, Instant},
};

use stepwell::{
    Result,
    host::pool::{Pool, PoolConfig},
    tier::volume::{
        Durability, EngineKind, Location, Options, RecordBuffer, Shape, Ticket, Volume, unique_name,
    },
};

/// After which a drive has failed.
const TIMEOUT: Duration = Duration::from_secs(60);

struct Arguments {
    folders: Vec<PathBuf>,
    weights: Vec<u32>,
    record_kib: usize,
    records: usize,
    buffers: usize,
    depth: usize,
    stripe_kib: usize,
    seconds: f64,
    engine: EngineKind,
    durability: Durability,
}

impl Arguments {
    fn parse(mut words: impl Iterator<Item = String>) -> std::result::Result<Self, Box<dyn Error>> {
        let mut found = Self {
            folders: Vec::new(),
            weights: Vec::new(),
            record_kib: 644,
            records: 512,
            buffers: 32,
            depth: 32,
            stripe_kib: 1024,
            seconds: 5.0,
            engine: EngineKind::Auto,
            durability: Durability::None,
        };
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("`{word}` without a value"));
            match word.as_str() {
                // Of cargo.
                "--bench" => {}
                "--weights" => {
                    let weights = value()?;
                    found.weights = weights
                        .split(',')
                        .map(str::parse)
                        .collect::<std::result::Result<_, _>>()?;
                }
                "--record-kib" => found.record_kib = value()?.parse()?,
                "--records" => found.records = value()?.parse()?,
                "--buffers" => found.buffers = value()?.parse()?,
                "--depth" => found.depth = value()?.parse()?,
                "--stripe-kib" => found.stripe_kib = value()?.parse()?,
                "--seconds" => found.seconds = value()?.parse()?,
                "--engine" => {
                    found.engine = match value()?.as_str() {
                        "auto" => EngineKind::Auto,
                        "io_uring" => EngineKind::IoUring,
                        "positional" => EngineKind::Positional,
                        other => return Err(format!("engine `{other}`").into()),
                    }
                }
                "--durability" => {
                    found.durability = match value()?.as_str() {
                        "none" => Durability::None,
                        "commit" => Durability::Commit,
                        other => return Err(format!("durability `{other}`").into()),
                    }
                }
                flag if flag.starts_with('-') => return Err(format!("argument `{flag}`").into()),
                folder => found.folders.push(folder.into()),
            }
        }
        Ok(found)
    }
}

fn finish(ticket: &mut Ticket) -> Result<RecordBuffer> {
    let buffer = ticket.wait(TIMEOUT)?;
    buffer.ok_or_else(|| stepwell::Error::value(format!("no answer for {TIMEOUT:?}")))
}

/// What is in flight.
struct Run<'a> {
    volume: &'a Volume,
    tickets: VecDeque<(usize, Ticket)>,
    step: u64,
}

impl Run<'_> {
    /// A buffer that is free, or that of what was begun first.
    fn buffer(&mut self) -> Result<RecordBuffer> {
        if let Some(buffer) = self.volume.buffer(Duration::ZERO) {
            return Ok(buffer);
        }
        match self.tickets.pop_front() {
            Some((_, mut ticket)) => finish(&mut ticket),
            None => Err(stepwell::Error::value("no buffer is free, and nothing is in flight")),
        }
    }

    fn drain(&mut self) -> Result<()> {
        self.tickets.drain(..).try_for_each(|(_, mut ticket)| finish(&mut ticket).map(drop))
    }

    fn commit(&mut self) -> Result<()> {
        self.drain()?;
        self.volume.commit(self.step)?;
        self.step += 1;
        Ok(())
    }

    fn write(&mut self) -> Result<()> {
        for record in 0..self.volume.num_records() {
            let buffer = self.buffer()?;
            let ticket = self.volume.write(record, self.step, buffer)?;
            self.tickets.push_back((record, ticket));
        }
        self.commit()
    }

    fn read(&mut self) -> Result<()> {
        for record in 0..self.volume.num_records() {
            let buffer = self.buffer()?;
            self.tickets.push_back((record, self.volume.read(record, buffer)?));
        }
        self.drain()
    }

    /// Reads run ahead by half of the buffers; writes have the other half.
    fn swap(&mut self, buffers: usize) -> Result<()> {
        let ahead = (buffers / 2).max(1);
        let mut reads: VecDeque<(usize, Ticket)> = VecDeque::new();
        for record in 0..self.volume.num_records() + ahead {
            if record < self.volume.num_records() {
                let buffer = self.buffer()?;
                reads.push_back((record, self.volume.read(record, buffer)?));
            }
            if record >= ahead
                && let Some((record, mut ticket)) = reads.pop_front()
            {
                let buffer = finish(&mut ticket)?;
                let ticket = self.volume.write(record, self.step, buffer)?;
                self.tickets.push_back((record, ticket));
            }
        }
        self.commit()
    }
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let mut arguments = Arguments::parse(std::env::args().skip(1))?;
    let temporary = tempfile::tempdir()?;
    if arguments.folders.is_empty() {
        arguments = Arguments {
            folders: vec![temporary.path().to_owned()],
            records: 4,
            buffers: 3,
            seconds: 0.0,
            ..arguments
        };
    }
    let location = Location { name: unique_name()?, folders: arguments.folders };
    let shape = Shape {
        weights: arguments.weights,
        stripe_bytes: arguments.stripe_kib << 10,
        durability: arguments.durability,
        ..Shape::new(vec![arguments.record_kib << 10; arguments.records])
    };
    let options = Options {
        engine: arguments.engine,
        queue_depth: arguments.depth,
        num_buffers: arguments.buffers,
        ..Options::default()
    };
    let pool = Pool::new(&PoolConfig::default())?;
    let begin = Instant::now();
    let volume = Volume::create(&location, &shape, &options, &pool)?;
    let mut out = std::io::stdout();
    writeln!(
        out,
        "{} members, {} records of {} KiB, made in {:.2} s; io_uring {}, O_DIRECT {}",
        location.folders.len(),
        arguments.records,
        arguments.record_kib,
        begin.elapsed().as_secs_f64(),
        volume.has_rings(),
        volume.is_direct()
    )?;
    let mut run = Run { volume: &volume, tickets: VecDeque::new(), step: 1 };
    // Once: the first write of a block is slower.
    run.write()?;
    for row in ["write", "read", "swap"] {
        let (read, written) = volume.bytes_moved();
        let mut passes = 0;
        let begin = Instant::now();
        loop {
            match row {
                "write" => run.write()?,
                "read" => run.read()?,
                _ => run.swap(arguments.buffers)?,
            }
            passes += 1;
            if begin.elapsed().as_secs_f64() >= arguments.seconds {
                break;
            }
        }
        let seconds = begin.elapsed().as_secs_f64();
        let after = volume.bytes_moved();
        let rate = |nbytes: u64| nbytes as f64 / 1e6 / seconds;
        writeln!(
            out,
            "{row:5} read {:8.1} MB/s, written {:8.1} MB/s; {passes} passes in {seconds:.2} s",
            rate(after.0 - read),
            rate(after.1 - written)
        )?;
    }
    volume.close()?;
    Ok(())
}
