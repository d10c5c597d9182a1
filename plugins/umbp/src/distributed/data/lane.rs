//! Asks another node, many things at once on one connection.

use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader, BufWriter};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};

use super::frame::{self, ANSWER, MAGIC, Operation, Request, Status};
use crate::object::{Piece, Read};

/// What is to be filled, and with what.
#[derive(Debug)]
pub struct Fill<'a> {
    /// The place.
    pub slot: u64,
    /// The bytes.
    pub pieces: &'a [Piece],
}

/// The answer to one question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// How it went.
    pub status: Status,
    /// The payload's bytes, or the length of the object.
    pub number: u64,
}

/// Connects to a node. It has to be the instance that is meant: another one may have come to its address.
///
/// # Errors
/// When it is not.
pub async fn connect(address: &str, instance: u64) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    stream.write_all(&frame::greeting(instance)).await?;
    let mut magic = [0; MAGIC.len()];
    stream.read_exact(&mut magic).await.map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => io::Error::other("another node has come to that address"),
        _ => error,
    })?;
    if magic == MAGIC { Ok(stream) } else { Err(io::Error::other("it speaks another protocol")) }
}

/// Reads objects. Answers go to `answers`, also those that came before an error.
///
/// # Safety
/// The pieces of the reads can be written and nobody else touches them, until the future is done or dropped.
pub async unsafe fn read(stream: &mut TcpStream, reads: &[&Read], answers: &mut Vec<Answer>) -> io::Result<()> {
    let (input, output) = stream.split();
    let mut output = BufWriter::with_capacity(64 << 10, output);
    let ask = async {
        for read in reads {
            ask_for(&mut output, read).await?;
        }
        output.flush().await
    };
    let mut input = BufReader::with_capacity(64 << 10, input);
    let take = async {
        for read in reads {
            let answer = answer(&mut input).await?;
            if answer.status == Status::Done {
                let wanted: u64 = read.ranges.iter().map(|range| range.piece.len as u64).sum();
                if answer.number != wanted {
                    return Err(io::Error::other(format!("it sends {} bytes, not {wanted}", answer.number)));
                }
                for range in &read.ranges {
                    // SAFETY: the caller's promise: for as long as this future lives, the piece is its own.
                    let bytes = unsafe { std::slice::from_raw_parts_mut(range.piece.base, range.piece.len) };
                    input.read_exact(bytes).await?;
                }
            }
            answers.push(answer);
        }
        Ok(())
    };
    tokio::try_join!(ask, take).map(|_| ())
}

async fn ask_for(output: &mut BufWriter<WriteHalf<'_>>, read: &Read) -> io::Result<()> {
    let (name, ranges) = (read.name.len() as u32, read.ranges.len() as u32);
    let request = Request { operation: Operation::Read, name, ranges, len: read.len, slot: 0 };
    output.write_all(&request.to_bytes()).await?;
    output.write_all(&read.name).await?;
    for range in &read.ranges {
        output.write_all(&frame::range(range.offset, range.piece.len as u64)).await?;
    }
    Ok(())
}

async fn answer(input: &mut BufReader<ReadHalf<'_>>) -> io::Result<Answer> {
    let mut bytes = [0; ANSWER];
    input.read_exact(&mut bytes).await?;
    let (status, number) = Status::from_bytes(&bytes).ok_or_else(|| io::Error::other("it answers with no status"))?;
    Ok(Answer { status, number })
}

/// Fills places. Answers go to `answers`, also those that came before an error.
///
/// # Safety
/// The pieces can be read and nobody writes them, until the future is done or dropped.
pub async unsafe fn fill(stream: &mut TcpStream, fills: &[Fill<'_>], answers: &mut Vec<Answer>) -> io::Result<()> {
    let (input, output) = stream.split();
    let mut output = BufWriter::with_capacity(16 << 10, output);
    let send = async {
        for fill in fills {
            let len = fill.pieces.iter().map(|piece| piece.len as u64).sum();
            let request = Request { operation: Operation::Write, name: 0, ranges: 0, len, slot: fill.slot };
            output.write_all(&request.to_bytes()).await?;
            for piece in fill.pieces {
                // SAFETY: the caller's promise: for as long as this future lives, nobody writes the piece.
                let bytes = unsafe { std::slice::from_raw_parts(piece.base, piece.len) };
                output.write_all(bytes).await?;
            }
        }
        output.flush().await
    };
    let mut input = BufReader::new(input);
    let take = async {
        for _ in fills {
            answers.push(answer(&mut input).await?);
        }
        Ok(())
    };
    tokio::try_join!(send, take).map(|_| ())
}
