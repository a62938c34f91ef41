//! The rendezvous of ranks: each has a TCP connection to rank 0, which listens until all are there.
//!
//! Nothing of a run travels here but what is needed to begin (rank 0's gift: the id of an NCCL clique) and,
//! afterwards, signs of life ([`watch`](super::watch)). Every wait has a limit, and who is missing is named.

use super::CollectiveError;
use std::fmt;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// What a rank says first, so that strangers are not taken for ranks. The digit is the protocol's version.
const MAGIC: &[u8; 8] = b"QURLRNK2";
/// How long a newcomer may take to say who it is.
const HELLO: Duration = Duration::from_secs(2);
/// A pause between tries.
const PAUSE: Duration = Duration::from_millis(20);
/// Bytes of the largest frame.
const MAX_FRAME: usize = 1 << 20;

/// Where rank 0 listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// A name or an address of its machine.
    pub host: String,
    /// The port.
    pub port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// What is said over a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// A rank says who it is.
    Hello = 1,
    /// Rank 0: all are there.
    Welcome = 2,
    /// Something is wrong; the text says what. The run ends.
    Fault = 3,
    /// A sign of life, with the numbers of exchanges begun and ended.
    Beat = 4,
    /// The rank has finished.
    Leave = 5,
}

/// One thing said.
pub(super) struct Frame {
    pub kind: Kind,
    pub content: Vec<u8>,
}

impl Frame {
    pub fn new(kind: Kind, content: &[u8]) -> Frame {
        Frame { kind, content: content.to_vec() }
    }

    pub fn write(&self, stream: &mut TcpStream) -> std::io::Result<()> {
        let mut bytes = vec![self.kind as u8];
        bytes.extend((self.content.len() as u32).to_le_bytes());
        bytes.extend(&self.content);
        stream.write_all(&bytes)
    }

    pub fn read(stream: &mut TcpStream) -> std::io::Result<Frame> {
        let mut head = [0; 5];
        stream.read_exact(&mut head)?;
        let strange = |what: &str| std::io::Error::new(std::io::ErrorKind::InvalidData, what.to_string());
        let kinds = [Kind::Hello, Kind::Welcome, Kind::Fault, Kind::Beat, Kind::Leave];
        let kind = kinds.into_iter().find(|&kind| kind as u8 == head[0]);
        let kind = kind.ok_or_else(|| strange("not a frame of ours"))?;
        let len = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
        if len > MAX_FRAME {
            return Err(strange("a frame that is too long"));
        }
        let mut content = vec![0; len];
        stream.read_exact(&mut content)?;
        Ok(Frame { kind, content })
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.content).into_owned()
    }
}

/// Who joins.
#[derive(Clone, Copy)]
pub(super) struct Guest<'a> {
    pub rank: usize,
    pub size: usize,
    /// What all ranks must have in common from the start: the program's version.
    pub identity: &'a str,
}

/// The connections of a rank: rank 0's to all others, in order; another's to rank 0.
pub(super) struct Met {
    pub others: Vec<(usize, TcpStream)>,
    /// What rank 0 gave to everyone.
    pub gift: Vec<u8>,
}

/// Listens as rank 0.
pub(super) fn listen(at: &Address) -> Result<TcpListener, CollectiveError> {
    // On its own machine alone where that is all there is.
    let local = ["localhost", "127.0.0.1", "::1"].contains(&at.host.as_str());
    let host = if local { at.host.as_str() } else { "0.0.0.0" };
    TcpListener::bind((host, at.port)).map_err(|e| CollectiveError::Failed {
        what: format!("listening for the other ranks at {at}"),
        reason: format!("{e}; MASTER_PORT, or QURL_PORT for this program alone, names another port"),
    })
}

/// Waits as rank 0 until all others are there, and gives each the gift.
pub(super) fn receive_all(
    listener: &TcpListener,
    guest: Guest,
    gift: &[u8],
    limit: Duration,
) -> Result<Met, CollectiveError> {
    let at = listener.local_addr().map_or(String::new(), |at| at.to_string());
    let failed =
        |reason: String| CollectiveError::Failed { what: format!("rendezvous of the ranks at {at}"), reason };
    listener.set_nonblocking(true).map_err(|e| failed(e.to_string()))?;
    let (began, mut here) = (Instant::now(), vec![]);
    here.resize_with(guest.size, || None);
    let outcome = loop {
        let missing: Vec<usize> = (1..guest.size).filter(|&rank| here[rank].is_none()).collect();
        if missing.is_empty() {
            break Ok(());
        }
        if began.elapsed() > limit {
            break Err(failed(format!(
                "{} did not come within {} s",
                name_ranks(&missing, guest.size),
                limit.as_secs_f64()
            )));
        }
        match listener.accept() {
            Ok((stream, _)) => match admit(stream, guest) {
                Ok(Some((rank, stream))) if here[rank].is_none() => here[rank] = Some(stream),
                Ok(Some((rank, _))) => break Err(failed(format!("two processes say they are rank {rank}"))),
                Ok(None) => {} // a stranger
                Err(reason) => break Err(failed(reason)),
            },
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => std::thread::sleep(PAUSE),
            Err(e) => break Err(failed(e.to_string())),
        }
    };
    let mut others: Vec<_> =
        here.into_iter().enumerate().filter_map(|(rank, stream)| Some((rank, stream?))).collect();
    let frame = match &outcome {
        Ok(()) => Frame::new(Kind::Welcome, gift),
        Err(error) => Frame::new(Kind::Fault, error.to_string().as_bytes()),
    };
    for (rank, stream) in &mut others {
        if let Err(e) = frame.write(stream)
            && outcome.is_ok()
        {
            return Err(CollectiveError::Lost { rank: *rank, size: guest.size, reason: e.to_string() });
        }
    }
    outcome.map(|()| Met { others, gift: gift.to_vec() })
}

/// Who a newcomer is; nobody where it is no rank of ours, an error where it is one of another run.
fn admit(mut stream: TcpStream, guest: Guest) -> Result<Option<(usize, TcpStream)>, String> {
    let ready = stream.set_nonblocking(false).and_then(|()| stream.set_read_timeout(Some(HELLO)));
    let Ok(hello) = ready.and_then(|()| Frame::read(&mut stream)) else { return Ok(None) };
    let (Kind::Hello, Some((head, identity))) = (hello.kind, hello.content.split_at_checked(MAGIC.len() + 8))
    else {
        return Ok(None);
    };
    let (magic, numbers) = head.split_at(MAGIC.len());
    if magic != MAGIC {
        return Ok(None);
    }
    let number = |at: usize| numbers[at..at + 4].iter().rev().fold(0, |n, &byte| n << 8 | usize::from(byte));
    let (rank, size, identity) = (number(0), number(4), String::from_utf8_lossy(identity));
    let wrong = if size != guest.size {
        Some(format!("rank {rank} counts {size} ranks, rank 0 counts {}", guest.size))
    } else if rank == 0 || rank >= size {
        Some(format!("a process says it is rank {rank} of {size}"))
    } else if identity != guest.identity {
        Some(format!("rank {rank} runs {identity}, rank 0 runs {}", guest.identity))
    } else {
        None
    };
    match wrong {
        None => Ok(Some((rank, stream))),
        Some(wrong) => {
            let _ = Frame::new(Kind::Fault, wrong.as_bytes()).write(&mut stream); // it may be gone
            Err(wrong)
        }
    }
}

/// Comes to rank 0 as another rank and waits until all are there.
pub(super) fn come(at: &Address, guest: Guest, limit: Duration) -> Result<Met, CollectiveError> {
    let failed = |reason: String| CollectiveError::Failed { what: format!("joining rank 0 at {at}"), reason };
    let began = Instant::now();
    let mut stream = loop {
        match connect(at) {
            Ok(stream) => break stream,
            Err(e) if began.elapsed() > limit => {
                let seconds = limit.as_secs_f64();
                return Err(failed(format!("rank 0 did not answer within {seconds} s: {e}")));
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    };
    let mut hello = MAGIC.to_vec();
    hello.extend((guest.rank as u32).to_le_bytes());
    hello.extend((guest.size as u32).to_le_bytes());
    hello.extend(guest.identity.as_bytes());
    // Rank 0 gives up first and says who is missing.
    let patience = limit + 2 * HELLO;
    let welcome = stream
        .set_read_timeout(Some(patience))
        .and_then(|()| Frame::new(Kind::Hello, &hello).write(&mut stream))
        .and_then(|()| Frame::read(&mut stream))
        .map_err(|e| failed(format!("rank 0 listens and does not answer: {e}")))?;
    match welcome.kind {
        Kind::Welcome => Ok(Met { others: vec![(0, stream)], gift: welcome.content }),
        Kind::Fault => Err(failed(welcome.text())),
        kind => Err(failed(format!("rank 0 says {kind:?}, expected {:?}", Kind::Welcome))),
    }
}

fn connect(at: &Address) -> std::io::Result<TcpStream> {
    let mut last = std::io::Error::new(std::io::ErrorKind::NotFound, "the name has no address");
    for address in (at.host.as_str(), at.port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, HELLO) {
            Ok(stream) => return Ok(stream),
            Err(e) => last = e,
        }
    }
    Err(last)
}

/// "rank 3 of 4", "ranks 1, 2 of 4".
pub(super) fn name_ranks(ranks: &[usize], size: usize) -> String {
    let list = ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    format!("rank{} {list} of {size}", if ranks.len() == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(300);
    const LONG: Duration = Duration::from_secs(20);

    fn guest(rank: usize, size: usize) -> Guest<'static> {
        Guest { rank, size, identity: "test" }
    }

    fn listener() -> (TcpListener, Address) {
        let listener = listen(&Address { host: "127.0.0.1".to_string(), port: 0 }).expect("a free port");
        let port = listener.local_addr().expect("its address").port();
        (listener, Address { host: "127.0.0.1".to_string(), port })
    }

    #[test]
    fn ranks_meet_in_any_order_among_strangers() {
        let (listener, at) = listener();
        let mut stranger = TcpStream::connect((at.host.as_str(), at.port)).expect("connected");
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("sent");
        let ranks = [3, 1, 2].map(|rank| {
            let at = at.clone();
            std::thread::spawn(move || come(&at, guest(rank, 4), LONG).map(|met| met.gift))
        });
        let met = receive_all(&listener, guest(0, 4), b"id", LONG).expect("all came");
        assert_eq!(met.others.iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), [1, 2, 3]);
        for rank in ranks {
            assert_eq!(rank.join().expect("ends"), Ok(b"id".to_vec()));
        }
    }

    #[test]
    fn a_busy_port_is_named() {
        let (_listener, at) = listener();
        let error = listen(&at).expect_err("busy").to_string();
        assert!(error.contains(&at.to_string()) && error.contains("in use"), "{error}");
        assert!(error.contains("QURL_PORT"), "{error}");
    }

    #[test]
    fn a_missing_rank_is_named_to_all() {
        let (listener, at) = listener();
        let other = std::thread::spawn(move || come(&at, guest(2, 4), LONG).map(|met| met.gift));
        let error = receive_all(&listener, guest(0, 4), &[], SHORT).map(|met| met.gift).expect_err("missing");
        assert!(error.to_string().contains("ranks 1, 3 of 4 did not come within 0.3 s"), "{error}");
        let told = other.join().expect("ends").expect_err("told").to_string();
        assert!(told.contains("ranks 1, 3 of 4 did not come"), "{told}");
    }

    #[test]
    fn a_missing_rank_0_is_named() {
        let (listener, at) = listener();
        drop(listener);
        let error = come(&at, guest(1, 2), SHORT).map(|met| met.gift).expect_err("nobody").to_string();
        assert!(
            error.contains(&format!("joining rank 0 at {at}")) && error.contains("within 0.3 s"),
            "{error}"
        );
    }

    #[test]
    fn ranks_of_another_run_are_named() {
        let cases = [
            (Guest { rank: 1, size: 3, identity: "test" }, "rank 1 counts 3 ranks, rank 0 counts 2"),
            (Guest { rank: 0, size: 2, identity: "test" }, "a process says it is rank 0 of 2"),
            (Guest { rank: 1, size: 2, identity: "qurl 9" }, "rank 1 runs qurl 9, rank 0 runs test"),
        ];
        for (stranger, expected) in cases {
            let (listener, at) = listener();
            let other = std::thread::spawn(move || come(&at, stranger, LONG).map(|met| met.gift));
            let error =
                receive_all(&listener, guest(0, 2), &[], LONG).map(|met| met.gift).expect_err("wrong");
            assert!(error.to_string().contains(expected), "{error}");
            let told = other.join().expect("ends").expect_err("told").to_string();
            assert!(told.contains(expected), "{told}");
        }
    }
}
