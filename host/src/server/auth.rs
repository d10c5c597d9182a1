//! API key and admin key.

use std::net::SocketAddr;

use axum::http::{HeaderMap, StatusCode, header};
use sha2::{Digest, Sha256};

use super::error::ApiError;

/// The keys that requests must carry, kept as digests.
#[derive(Clone, Debug, Default)]
pub struct Keys {
    api: Option<[u8; 32]>,
    admin: Option<[u8; 32]>,
}

impl Keys {
    /// Keys from the config.
    pub fn new(api: Option<&str>, admin: Option<&str>) -> Self {
        Self { api: api.map(digest), admin: admin.map(digest) }
    }

    /// Whether a request with these headers may use the serving endpoints. The admin key opens
    /// them too.
    pub fn check_api(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let Some(api) = &self.api else {
            return Ok(());
        };
        let given = bearer(headers).map(digest);
        let right = given.is_some_and(|given| {
            let admin = self.admin.as_ref().is_some_and(|admin| same(admin, &given));
            same(api, &given) | admin
        });
        if right { Ok(()) } else { Err(refused(given.is_some(), "server.api_key")) }
    }

    /// Whether a request from `peer` with these headers may use the admin endpoints: with the
    /// admin key, or from this machine when there is none (then also with the API key, if
    /// that is set).
    pub fn check_admin(&self, headers: &HeaderMap, peer: SocketAddr) -> Result<(), ApiError> {
        let given = bearer(headers).map(digest);
        match &self.admin {
            Some(admin) => match given {
                Some(given) if same(admin, &given) => Ok(()),
                _ => Err(refused(given.is_some(), "server.admin_key")),
            },
            None if !peer.ip().to_canonical().is_loopback() => Err(ApiError::new(
                StatusCode::FORBIDDEN,
                "the admin endpoints answer only this machine while server.admin_key is not set",
            )),
            None => self.check_api(headers),
        }
    }
}

fn refused(given: bool, key: &str) -> ApiError {
    let message = if given {
        format!("wrong key: `Authorization: Bearer KEY` must carry the server's {key}")
    } else {
        format!("no key: send `Authorization: Bearer KEY` with the server's {key}")
    };
    ApiError::new(StatusCode::UNAUTHORIZED, message).with_code("invalid_api_key")
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, key) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(key.trim_start())
}

/// Comparing digests takes the same time wherever two keys differ and however long they are.
fn digest(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

fn same(a: &[u8; 32], b: &[u8; 32]) -> bool {
    let difference = a.iter().zip(b).fold(0, |acc, (a, b)| acc | (a ^ b));
    std::hint::black_box(difference) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(key: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(header::AUTHORIZATION, key.parse().unwrap());
        headers
    }

    fn status(result: Result<(), ApiError>) -> u16 {
        result.map_or_else(|error| error.status.as_u16(), |()| 200)
    }

    #[test]
    fn without_keys_everything_is_open_on_this_machine() {
        let keys = Keys::default();
        let none = HeaderMap::new();
        assert_eq!(status(keys.check_api(&none)), 200);
        for here in ["127.0.0.1:9", "[::1]:9", "[::ffff:127.0.0.1]:9"] {
            assert_eq!(status(keys.check_admin(&none, here.parse().unwrap())), 200);
        }
        for there in ["192.0.2.1:9", "[2001:db8::1]:9", "0.0.0.0:9"] {
            assert_eq!(status(keys.check_admin(&none, there.parse().unwrap())), 403);
        }
    }

    #[test]
    fn the_api_key_is_asked_for() {
        let keys = Keys::new(Some("secret"), None);
        let here = "127.0.0.1:9".parse().unwrap();
        assert_eq!(status(keys.check_api(&HeaderMap::new())), 401);
        assert_eq!(status(keys.check_api(&with("Bearer secre"))), 401);
        assert_eq!(status(keys.check_api(&with("Basic secret"))), 401);
        assert_eq!(status(keys.check_api(&with("Bearer secret"))), 200);
        assert_eq!(status(keys.check_api(&with("bearer secret"))), 200);
        assert_eq!(status(keys.check_admin(&HeaderMap::new(), here)), 401);
        assert_eq!(status(keys.check_admin(&with("Bearer secret"), here)), 200);
    }

    #[test]
    fn the_admin_key_opens_both_and_the_api_key_only_one() {
        let keys = Keys::new(Some("user"), Some("root"));
        let there = "192.0.2.1:9".parse().unwrap();
        assert_eq!(status(keys.check_api(&with("Bearer root"))), 200);
        assert_eq!(status(keys.check_admin(&with("Bearer root"), there)), 200);
        assert_eq!(status(keys.check_admin(&with("Bearer user"), there)), 401);
        assert_eq!(status(keys.check_admin(&HeaderMap::new(), there)), 401);
    }
}
