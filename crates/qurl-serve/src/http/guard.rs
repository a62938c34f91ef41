//! Who may ask: names of the host, origins of pages, keys.

use axum::http::HeaderMap;
use axum::http::header::{AUTHORIZATION, HOST, ORIGIN};
use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Why a request is not answered, whatever it asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Not one Host header.
    NoHost,
    /// A name that is not this machine's.
    WrongHost,
    /// A page from elsewhere asks.
    WrongOrigin,
    /// No key, or a wrong one.
    WrongKey,
}

impl Refusal {
    /// The status and what is said.
    pub fn answer(self) -> (u16, &'static str) {
        match self {
            Refusal::NoHost => (400, "not an HTTP/1.1 request"),
            Refusal::WrongHost => (403, "this server answers to loopback names only"),
            Refusal::WrongOrigin => (403, "this server does not answer pages from elsewhere"),
            Refusal::WrongKey => (401, "a key is needed: Authorization: Bearer KEY"),
        }
    }
}

/// Checks that a request to the server at `address` names it as one may: on a loopback address by a loopback
/// name.
pub fn check_host(headers: &HeaderMap, address: SocketAddr) -> Result<(), Refusal> {
    let mut hosts = headers.get_all(HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else { return Err(Refusal::NoHost) };
    let host = host.to_str().map_err(|_| Refusal::WrongHost)?;
    match address.ip().is_loopback() && !names_loopback(host.trim()) {
        true => Err(Refusal::WrongHost),
        false => Ok(()),
    }
}

/// Whether a Host header names this machine by a loopback name. Any port will do: a tunnel (`ssh -L`) has one
/// of its own, and what is to be kept out, a page whose name was pointed here, shows in the name.
fn names_loopback(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port))
            if port.bytes().all(|digit| digit.is_ascii_digit()) && port.parse::<u16>().is_ok() =>
        {
            name
        }
        _ => host,
    };
    let ip = match name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
        Some(name) => name.parse::<Ipv6Addr>().map(IpAddr::V6),
        None => name.parse::<Ipv4Addr>().map(IpAddr::V4),
    };
    name.eq_ignore_ascii_case("localhost") || ip.is_ok_and(|ip| ip.is_loopback())
}

/// Refuses what a browser sends for a page of another site: without a key, such a page could otherwise give
/// orders to a server on the same machine.
pub fn check_origin(headers: &HeaderMap) -> Result<(), Refusal> {
    let Some(origin) = headers.get(ORIGIN) else { return Ok(()) };
    let own = headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let same = origin
        .to_str()
        .is_ok_and(|origin| origin.split_once("://").is_some_and(|(_, name)| name.eq_ignore_ascii_case(own)));
    if same { Ok(()) } else { Err(Refusal::WrongOrigin) }
}

/// Checks `Authorization: Bearer KEY`.
pub fn check_key(headers: &HeaderMap, key: &str) -> Result<(), Refusal> {
    let given = headers.get(AUTHORIZATION).map(|value| value.as_bytes()).unwrap_or_default();
    let (scheme, given) = given.split_at_checked(7).unwrap_or_default();
    let bearer = scheme.eq_ignore_ascii_case(b"bearer ");
    if same_secret(given, key.as_bytes()) && bearer { Ok(()) } else { Err(Refusal::WrongKey) }
}

/// Whether two secrets are equal, in a time that depends on the length of what was given alone.
pub fn same_secret(given: &[u8], secret: &[u8]) -> bool {
    let mut differs = u8::from(given.len() != secret.len());
    for (i, byte) in given.iter().enumerate() {
        let own = secret.get(i % secret.len().max(1)).copied().unwrap_or_default();
        differs |= black_box(byte ^ own);
    }
    black_box(differs) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, value.parse().expect("a header"));
        }
        headers
    }

    #[test]
    fn a_loopback_server_answers_to_loopback_names_only() {
        let address: SocketAddr = "127.0.0.1:7878".parse().expect("an address");
        let check = |host: &str, address| check_host(&headers(&[("host", host)]), address);
        // A tunnel listens on a port of its own.
        for host in [
            "127.0.0.1:7878",
            "localhost:7878",
            "LOCALHOST",
            "[::1]:7878",
            "127.0.0.1",
            "localhost:9000",
            "[::1]:1",
        ] {
            assert_eq!(check(host, address), Ok(()), "{host}");
        }
        for host in [
            "evil.example",
            "127.0.0.1.evil.example:7878",
            "localhost:99999",
            "localhost:+80",
            "localhost:80:80",
            "localhost.evil.example:80",
            "10.0.0.1:7878",
            "",
        ] {
            assert_eq!(check(host, address), Err(Refusal::WrongHost), "{host}");
        }
        assert_eq!(check("box.lan", "0.0.0.0:7878".parse().expect("an address")), Ok(()));
        assert_eq!(check_host(&headers(&[]), address), Err(Refusal::NoHost));
        let two = headers(&[("host", "localhost"), ("host", "evil")]);
        assert_eq!(check_host(&two, address), Err(Refusal::NoHost));
    }

    #[test]
    fn pages_from_elsewhere_and_wrong_keys_are_refused() {
        let from = |origin: &str| check_origin(&headers(&[("host", "localhost:80"), ("origin", origin)]));
        assert_eq!(from("http://localhost:80"), Ok(()));
        for origin in
            ["http://evil.example", "null", "http://localhost:81", "http://localhost:80.evil.example"]
        {
            assert_eq!(from(origin), Err(Refusal::WrongOrigin), "{origin}");
        }
        assert_eq!(check_origin(&headers(&[("host", "localhost")])), Ok(()));

        let with = |value: &str| check_key(&headers(&[("authorization", value)]), "secret");
        assert_eq!((with("Bearer secret"), with("bearer secret")), (Ok(()), Ok(())));
        for value in
            ["Bearer secre", "Bearer secrett", "Bearer secretsecret", "Bearer ", "Basic secret", "secret"]
        {
            assert_eq!(with(value), Err(Refusal::WrongKey), "{value}");
        }
        assert_eq!(check_key(&headers(&[]), "secret"), Err(Refusal::WrongKey));
    }
}
