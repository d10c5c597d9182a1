//! The cheapest client that speaks HTTP: one connection, kept open, one request on it at a time.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use anyhow::{Context, Result, bail, ensure};

/// Bytes of an answer that are taken at once; those of the bench are shorter.
const ROOM: usize = 4096;

/// A connection to a server.
pub struct Caller {
    stream: TcpStream,
    answer: Vec<u8>,
}

/// A request as it goes out, made before its time is taken.
pub struct Prepared(Vec<u8>);

impl Prepared {
    /// A POST of a JSON body.
    pub fn post(path: &str, body: &serde_json::Value) -> Self {
        let body = body.to_string();
        Self(
            format!(
                "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            )
            .into_bytes(),
        )
    }
}

impl Caller {
    /// Connects.
    ///
    /// # Errors
    /// When the server can't be reached.
    pub fn new(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(address).context("can't connect to the server")?;
        stream.set_nodelay(true).context("TCP_NODELAY")?;
        Ok(Self { stream, answer: Vec::with_capacity(ROOM) })
    }

    /// Sends a request and reads its answer whole.
    ///
    /// # Errors
    /// When the connection breaks, and when the answer is no 200 with a length.
    pub fn call(&mut self, request: &Prepared) -> Result<()> {
        self.stream.write_all(&request.0).context("can't send a request")?;
        self.answer.clear();
        let mut part = [0; ROOM];
        loop {
            let read = self.stream.read(&mut part).context("can't read an answer")?;
            ensure!(read > 0, "the server closed the connection within an answer");
            self.answer.extend_from_slice(part.get(..read).unwrap_or_default());
            if is_whole(&self.answer)? {
                return Ok(());
            }
        }
    }
}

/// Whether an answer is there to its last byte.
fn is_whole(answer: &[u8]) -> Result<bool> {
    const END: &[u8] = b"\r\n\r\n";
    let Some(head) = answer.windows(END.len()).position(|window| window == END) else { return Ok(false) };
    let (head, body) = answer.split_at(head + END.len());
    let head = std::str::from_utf8(head).context("the head of an answer is no text")?;
    let mut lines = head.lines();
    let status = lines.next().unwrap_or_default();
    let length =
        lines.filter_map(|line| line.split_once(':')).find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    let Some((_, length)) = length else { bail!("an answer without a length: {head}") };
    let length: usize = length.trim().parse().with_context(|| format!("the length of an answer: {head}"))?;
    if body.len() < length {
        return Ok(false);
    }
    ensure!(status.split(' ').nth(1) == Some("200"), "{status}: {}", String::from_utf8_lossy(body));
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_whole_with_its_last_byte() {
        let answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nContent-Length: 4\r\n\r\nfour";
        for length in 0..answer.len() {
            assert!(!is_whole(&answer[..length]).unwrap(), "{length}");
        }
        assert!(is_whole(answer).unwrap());
    }

    #[test]
    fn other_answers_are_errors_with_their_words() {
        let error = is_whole(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 5\r\n\r\nno no").unwrap_err();
        assert_eq!(error.to_string(), "HTTP/1.1 400 Bad Request: no no");
        assert!(is_whole(b"HTTP/1.1 200 OK\r\n\r\n").is_err());
    }
}
