//! Which path goes where.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::{Extension, MatchedPath, Path, RawQuery, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};

use super::error::ApiError;
use super::query::read_query;
use super::state::Server;
use super::{body, native, openai, storage_routes};
use crate::telemetry::METRICS_CONTENT_TYPE;

type Shared = State<Arc<Server>>;
type Answer = Result<Response, ApiError>;

/// Address of the client; put into each request by the listener.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peer(pub SocketAddr);

/// The whole HTTP face. Requests carry a [`Peer`].
pub fn router(server: Arc<Server>) -> Router {
    let open = Router::new()
        .route("/health", get(async |State(s): Shared| native::health(&s)))
        .route("/ready", get(async |State(s): Shared| native::health(&s)))
        .route("/health_generate", get(async |State(s): Shared| native::health_generate(s).await))
        .route("/metrics", get(metrics));
    let api = Router::new()
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/models", get(async |State(s): Shared| openai::list_models(&s)))
        .route("/v1/models/{*id}", get(one_model))
        .route("/generate", post(generate).put(generate))
        .route("/abort_request", post(abort_request))
        .route("/tokenize", post(tokenize))
        .route("/v1/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/v1/detokenize", post(detokenize))
        .route("/get_model_info", get(async |State(s): Shared| native::model_info(&s)))
        .route("/model_info", get(async |State(s): Shared| native::model_info(&s)))
        .route("/get_server_info", get(server_info))
        .route("/server_info", get(server_info))
        .route("/flush_cache", get(flush_cache).post(flush_cache))
        .route_layer(middleware::from_fn_with_state(server.clone(), need_api_key));
    let admin = Router::new()
        .route("/hicache/storage-backend", get(show_storage).put(attach_storage).delete(detach_storage))
        .route("/hicache/storage-backend/clear", post(clear_storage))
        .route_layer(middleware::from_fn_with_state(server.clone(), need_admin_key));
    open.merge(api)
        .merge(admin)
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(server.clone(), count))
        .with_state(server)
}

async fn need_api_key(State(server): Shared, request: Request, next: Next) -> Response {
    match server.keys.check_api(request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

async fn need_admin_key(
    State(server): Shared,
    Extension(Peer(peer)): Extension<Peer>,
    request: Request,
    next: Next,
) -> Response {
    match server.keys.check_admin(request.headers(), peer) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

/// Counts and logs every request.
async fn count(State(server): Shared, request: Request, next: Next) -> Response {
    let began = Instant::now();
    let endpoint = match request.extensions().get::<MatchedPath>() {
        Some(path) => path.as_str().to_owned(),
        None => "unknown".to_owned(),
    };
    let method = match *request.method() {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::DELETE => "DELETE",
        Method::HEAD => "HEAD",
        Method::OPTIONS => "OPTIONS",
        _ => "other",
    };
    server.http.request(&endpoint, method);
    let response = next.run(request).await;
    let status = response.status().as_u16();
    server.http.response(&endpoint, method, status);
    let seconds = began.elapsed().as_secs_f64();
    tracing::debug!(endpoint, method, status, seconds, "answer begun");
    response
}

async fn unknown_path(method: Method, uri: Uri) -> ApiError {
    let path: String = uri.path().chars().take(100).collect();
    ApiError::new(StatusCode::NOT_FOUND, format!("there is no {method} {path}")).with_code("not_found")
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    let path: String = uri.path().chars().take(100).collect();
    ApiError::new(
        StatusCode::METHOD_NOT_ALLOWED,
        format!("{path} does not take {method}; the Allow header lists what it takes"),
    )
    .with_code("method_not_allowed")
}

async fn metrics(State(server): Shared) -> Answer {
    let served = server.served()?;
    // The state of a backend may have to wait for it.
    let text = tokio::task::spawn_blocking(move || served.metrics.text(&server.http))
        .await
        .map_err(|_| ApiError::internal("collecting metrics failed"))?
        .map_err(|error| ApiError::internal(format!("writing metrics failed: {error}")))?;
    let mut response = text.into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(METRICS_CONTENT_TYPE));
    Ok(response)
}

async fn completions(State(server): Shared, request: Request) -> Answer {
    server.accepting()?;
    let fields = body::fields(&server, request).await?;
    openai::completions(server, fields).await
}

async fn chat_completions(State(server): Shared, request: Request) -> Answer {
    server.accepting()?;
    let fields = body::fields(&server, request).await?;
    openai::chat_completions(server, fields).await
}

async fn one_model(State(server): Shared, Path(id): Path<String>) -> Answer {
    openai::one_model(&server, &id)
}

async fn generate(State(server): Shared, request: Request) -> Answer {
    server.accepting()?;
    let fields = body::fields(&server, request).await?;
    native::generate(server, fields).await
}

async fn abort_request(State(server): Shared, request: Request) -> Answer {
    let fields = body::fields(&server, request).await?;
    native::abort_request(server, fields).await
}

async fn tokenize(State(server): Shared, request: Request) -> Answer {
    let fields = body::fields(&server, request).await?;
    native::tokenize(server, fields).await
}

async fn detokenize(State(server): Shared, request: Request) -> Answer {
    let fields = body::fields(&server, request).await?;
    native::detokenize(server, fields).await
}

async fn server_info(State(server): Shared) -> Answer {
    // The state of a backend may have to wait for it.
    tokio::task::spawn_blocking(move || native::server_info(&server))
        .await
        .map_err(|_| ApiError::internal("collecting the server's state failed"))?
}

async fn flush_cache(
    State(server): Shared,
    Extension(Peer(peer)): Extension<Peer>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Answer {
    let [tiers] = read_query(query.as_deref(), ["tiers"])?;
    let tiers = native::read_tiers(tiers.as_deref())?;
    if tiers.storage {
        // What others stored goes too, so this is the admin's.
        server.keys.check_admin(&headers, peer)?;
    }
    native::flush_cache(server, tiers, headers).await
}

async fn show_storage(State(server): Shared, RawQuery(query): RawQuery) -> Answer {
    let [] = read_query(query.as_deref(), [])?;
    storage_routes::show(&server)
}

async fn attach_storage(State(server): Shared, RawQuery(query): RawQuery, request: Request) -> Answer {
    server.accepting()?;
    // What to attach and where stands in the body.
    let [] = read_query(query.as_deref(), [])?;
    let fields = body::fields(&server, request).await?;
    storage_routes::attach(server, fields).await
}

async fn clear_storage(State(server): Shared, RawQuery(query): RawQuery) -> Answer {
    let [backend] = read_query(query.as_deref(), ["backend"])?;
    storage_routes::clear(server, backend).await
}

async fn detach_storage(State(server): Shared, RawQuery(query): RawQuery) -> Answer {
    let [backend, force] = read_query(query.as_deref(), ["backend", "force"])?;
    let force = match force.as_deref() {
        None | Some("false" | "0") => false,
        Some("true" | "1" | "") => true,
        Some(other) => {
            let other: String = other.chars().take(40).collect();
            return Err(ApiError::field("force", format!("takes true or false; found {other:?}")));
        }
    };
    storage_routes::detach(server, backend, force).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::{Keys, bind, run};

    /// Statuses of requests to a server that is still loading.
    async fn while_loading(keys: Keys, requests: &'static [(&'static str, &'static str)]) -> Vec<u16> {
        let server = Arc::new(Server::new(keys, 1 << 20));
        let (listener, address) = bind("127.0.0.1", 0).await.unwrap();
        let (stop, stopped) = tokio::sync::watch::channel(false);
        let running = tokio::spawn(run(listener, router(server), stopped));
        let statuses = tokio::task::spawn_blocking(move || {
            let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
            let status = |(method, path): &(&str, &str)| {
                let url = format!("http://{address}{path}");
                let response = match *method {
                    "GET" => agent.get(url).call(),
                    _ => agent.post(url).send_json(serde_json::json!({})),
                };
                response.unwrap().status().as_u16()
            };
            requests.iter().map(status).collect()
        });
        let statuses = statuses.await.unwrap();
        stop.send(true).unwrap();
        running.await.unwrap();
        statuses
    }

    #[tokio::test]
    async fn everything_is_503_while_the_model_loads() {
        let requests = &[
            ("GET", "/health"),
            ("GET", "/health_generate"),
            ("GET", "/v1/models"),
            ("GET", "/metrics"),
            ("GET", "/server_info"),
            ("GET", "/hicache/storage-backend"),
            ("POST", "/v1/chat/completions"),
            ("POST", "/generate"),
        ];
        assert_eq!(while_loading(Keys::default(), requests).await, [503; 8]);
        let others = &[("GET", "/nothing"), ("GET", "/generate")];
        assert_eq!(while_loading(Keys::default(), others).await, [404, 405]);
    }

    #[tokio::test]
    async fn keys_are_asked_for_before_anything_else_is_said() {
        let requests =
            &[("POST", "/generate"), ("GET", "/v1/models"), ("GET", "/hicache/storage-backend"), ("GET", "/health")];
        let keys = Keys::new(Some("a"), Some("b"));
        assert_eq!(while_loading(keys, requests).await, [401, 401, 401, 503]);
    }
}
