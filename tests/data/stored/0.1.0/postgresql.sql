--
-- PostgreSQL database dump
--

\restrict nxBVsj798flCcOXLAkqUz3KtyOc3qawXuSeklJePlDZ8TOLurshEwGYbfgkDIFu

-- Dumped from database version 18.4
-- Dumped by pg_dump version 18.4

SET statement_timeout = 0;
SET lock_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET transaction_timeout = 0;
SET client_encoding = 'UTF8';
SET standard_conforming_strings = on;
SELECT pg_catalog.set_config('search_path', '', false);
SET check_function_bodies = false;
SET xmloption = content;
SET client_min_messages = warning;
SET row_security = off;

SET default_tablespace = '';

SET default_table_access_method = heap;

--
-- Name: agents; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.agents (
    sequence bigint NOT NULL,
    id character varying(32) NOT NULL,
    name character varying(200) NOT NULL,
    instance character varying(64) NOT NULL,
    content text NOT NULL,
    draining boolean NOT NULL,
    job_id character varying(32),
    registered_at timestamp with time zone NOT NULL,
    last_seen_at timestamp with time zone NOT NULL,
    asked_at timestamp with time zone
);


--
-- Name: agents_sequence_seq; Type: SEQUENCE; Schema: public; Owner: -
--

CREATE SEQUENCE public.agents_sequence_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: agents_sequence_seq; Type: SEQUENCE OWNED BY; Schema: public; Owner: -
--

ALTER SEQUENCE public.agents_sequence_seq OWNED BY public.agents.sequence;


--
-- Name: alembic_version; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.alembic_version (
    version_num character varying(32) NOT NULL
);


--
-- Name: alias_moves; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.alias_moves (
    sequence bigint NOT NULL,
    name character varying(200) NOT NULL,
    plan_id character varying(32),
    moved_by character varying(200) NOT NULL,
    moved_at timestamp with time zone NOT NULL
);


--
-- Name: alias_moves_sequence_seq; Type: SEQUENCE; Schema: public; Owner: -
--

CREATE SEQUENCE public.alias_moves_sequence_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: alias_moves_sequence_seq; Type: SEQUENCE OWNED BY; Schema: public; Owner: -
--

ALTER SEQUENCE public.alias_moves_sequence_seq OWNED BY public.alias_moves.sequence;


--
-- Name: aliases; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.aliases (
    sequence bigint NOT NULL,
    name character varying(200) NOT NULL,
    plan_id character varying(32) NOT NULL,
    version bigint NOT NULL,
    moved_by character varying(200) NOT NULL,
    created_at timestamp with time zone NOT NULL,
    moved_at timestamp with time zone NOT NULL
);


--
-- Name: aliases_sequence_seq; Type: SEQUENCE; Schema: public; Owner: -
--

CREATE SEQUENCE public.aliases_sequence_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: aliases_sequence_seq; Type: SEQUENCE OWNED BY; Schema: public; Owner: -
--

ALTER SEQUENCE public.aliases_sequence_seq OWNED BY public.aliases.sequence;


--
-- Name: clusters; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.clusters (
    sequence bigint NOT NULL,
    id character varying(32) NOT NULL,
    content text NOT NULL,
    device_name text NOT NULL,
    devices integer NOT NULL,
    created_at timestamp with time zone NOT NULL
);


--
-- Name: clusters_sequence_seq; Type: SEQUENCE; Schema: public; Owner: -
--

CREATE SEQUENCE public.clusters_sequence_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: clusters_sequence_seq; Type: SEQUENCE OWNED BY; Schema: public; Owner: -
--

ALTER SEQUENCE public.clusters_sequence_seq OWNED BY public.clusters.sequence;


--
-- Name: events; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.events (
    sequence bigint NOT NULL,
    job_id character varying(32),
    run_id character varying(32),
    number integer NOT NULL,
    kind character varying(32) NOT NULL,
    data text NOT NULL,
    created_at timestamp with time zone NOT NULL,
    CONSTRAINT ck_events_subject CHECK (((job_id IS NULL) <> (run_id IS NULL)))
);


--
-- Name: events_sequence_seq; Type: SEQUENCE; Schema: public; Owner: -
--

CREATE SEQUENCE public.events_sequence_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: events_sequence_seq; Type: SEQUENCE OWNED BY; Schema: public; Owner: -
--

ALTER SEQUENCE public.events_sequence_seq OWNED BY public.events.sequence;


--
-- Name: idempotency_keys; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.idempotency_keys (
    sequence bigint NOT NULL,
    caller character varying(200) NOT NULL,
    key character varying(200) NOT NULL,
    fingerprint character varying(64) NOT NULL,
    status integer,
    location text,
    body text,
    held_until timestamp with time zone NOT NULL,
    expires_at timestamp with time zone NOT NULL
);


--
-- Name: idempotency_keys_sequence_seq; Type: SEQUENCE; Schema: public; Owner: -
--

CREATE SEQUENCE public.idempotency_keys_sequence_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: idempotency_keys_sequence_seq; Type: SEQUENCE OWNED BY; Schema: public; Owner: -
--

ALTER SEQUENCE public.idempotency_keys_sequence_seq OWNED BY public.idempotency_keys.sequence;


--
-- Name: jobs; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.jobs (
    sequence bigint NOT NULL,
    id character varying(32) NOT NULL,
    kind character varying(16) NOT NULL,
    task text NOT NULL,
    state character varying(16) NOT NULL,
    attempts integer NOT NULL,
    agent character varying(200),
    token character varying(64),
    lease_expires_at timestamp with time zone,
    progress text,
    error text,
    profile_id character varying(32),
    cluster_id character varying(32),
    run_id character varying(32),
    result_id character varying(32),
    idempotency_key character varying(200),
    created_at timestamp with time zone NOT NULL,
    updated_at timestamp with time zone NOT NULL,
    plan_id character varying(32),
    answer text,
    fence integer DEFAULT 0 NOT NULL,
    needs_id character varying(32) DEFAULT 'any'::character varying NOT NULL,
    needs text DEFAULT '{}'::text NOT NULL,
    instance character varying(64),
    gang text,
    not_before timestamp with time zone,
    asked_by character varying(200),
    CONSTRAINT ck_jobs_state CHECK (((state)::text = ANY ((ARRAY['queued'::character varying, 'leased'::character varying, 'succeeded'::character varying, 'failed'::character varying, 'cancelled'::character varying, 'dead'::character varying])::text[])))
);


--
-- Name: jobs_sequence_seq; Type: SEQUENCE; Schema: public; Owner: -
--

CREATE SEQUENCE public.jobs_sequence_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: jobs_sequence_seq; Type: SEQUENCE OWNED BY; Schema: public; Owner: -
--

ALTER SEQUENCE public.jobs_sequence_seq OWNED BY public.jobs.sequence;


--
-- Name: members; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.members (
    sequence bigint NOT NULL,
    job_id character varying(32) NOT NULL,
    node_rank integer NOT NULL,
    fence integer NOT NULL,
    agent character varying(200) NOT NULL,
    instance character varying(64) NOT NULL,
    token character varying(64) NOT NULL,
    state character varying(16) NOT NULL,
    error text,
    expires_at timestamp with time zone NOT NULL,
    ended_at timestamp with time zone,
    CONSTRAINT ck_members_state CHECK (((state)::text = ANY ((ARRAY['given'::character varying, 'joined'::character varying, 'done'::character varying, 'lost'::character varying])::text[])))
);


--
-- Name: members_sequence_seq; Type: SEQUENCE; Schema: public; Owner: -
--

CREATE SEQUENCE public.members_sequence_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: members_sequence_seq; Type: SEQUENCE OWNED BY; Schema: public; Owner: -
--

ALTER SEQUENCE public.members_sequence_seq OWNED BY public.members.sequence;


--
-- Name: plans; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.plans (
    sequence bigint NOT NULL,
    id character varying(32) NOT NULL,
    content text NOT NULL,
    request text NOT NULL,
    solve_time_s double precision NOT NULL,
    planner character varying(64) NOT NULL,
    model_name text NOT NULL,
    profile_id character varying(32) NOT NULL,
    cluster_id character varying(32) NOT NULL,
    schedule character varying(32) NOT NULL,
    depth integer NOT NULL,
    width integer,
    workers integer NOT NULL,
    batch_size bigint NOT NULL,
    microbatch_size bigint NOT NULL,
    microbatches bigint NOT NULL,
    throughput_samples_per_s double precision NOT NULL,
    bubble_fraction double precision NOT NULL,
    created_at timestamp with time zone NOT NULL,
    estimated boolean DEFAULT false NOT NULL,
    memory_bytes bigint DEFAULT '0'::bigint NOT NULL,
    device_name text DEFAULT 'unknown'::text NOT NULL,
    devices integer DEFAULT 0 NOT NULL,
    asked_by character varying(200)
);


--
-- Name: plans_sequence_seq; Type: SEQUENCE; Schema: public; Owner: -
--

CREATE SEQUENCE public.plans_sequence_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: plans_sequence_seq; Type: SEQUENCE OWNED BY; Schema: public; Owner: -
--

ALTER SEQUENCE public.plans_sequence_seq OWNED BY public.plans.sequence;


--
-- Name: profiles; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.profiles (
    sequence bigint NOT NULL,
    id character varying(32) NOT NULL,
    content text NOT NULL,
    model_name text NOT NULL,
    device_name text NOT NULL,
    dtype character varying(16) NOT NULL,
    blocks integer NOT NULL,
    created_at timestamp with time zone NOT NULL,
    estimated boolean DEFAULT false NOT NULL
);


--
-- Name: profiles_sequence_seq; Type: SEQUENCE; Schema: public; Owner: -
--

CREATE SEQUENCE public.profiles_sequence_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: profiles_sequence_seq; Type: SEQUENCE OWNED BY; Schema: public; Owner: -
--

ALTER SEQUENCE public.profiles_sequence_seq OWNED BY public.profiles.sequence;


--
-- Name: reports; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.reports (
    sequence bigint NOT NULL,
    id character varying(64) NOT NULL,
    job_id character varying(32) NOT NULL,
    created_at timestamp with time zone NOT NULL
);


--
-- Name: reports_sequence_seq; Type: SEQUENCE; Schema: public; Owner: -
--

CREATE SEQUENCE public.reports_sequence_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: reports_sequence_seq; Type: SEQUENCE OWNED BY; Schema: public; Owner: -
--

ALTER SEQUENCE public.reports_sequence_seq OWNED BY public.reports.sequence;


--
-- Name: run_chunks; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.run_chunks (
    run_id character varying(32) NOT NULL,
    series integer NOT NULL,
    part integer NOT NULL,
    rows integer NOT NULL,
    first bigint NOT NULL,
    last bigint NOT NULL,
    content bytea NOT NULL
);


--
-- Name: runs; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.runs (
    sequence bigint NOT NULL,
    id character varying(32) NOT NULL,
    job_id character varying(32) NOT NULL,
    plan_id character varying(32) NOT NULL,
    report text,
    predicted_samples_per_s double precision,
    measured_samples_per_s double precision,
    created_at timestamp with time zone NOT NULL,
    timeline_head text
);


--
-- Name: runs_sequence_seq; Type: SEQUENCE; Schema: public; Owner: -
--

CREATE SEQUENCE public.runs_sequence_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: runs_sequence_seq; Type: SEQUENCE OWNED BY; Schema: public; Owner: -
--

ALTER SEQUENCE public.runs_sequence_seq OWNED BY public.runs.sequence;


--
-- Name: server_keys; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.server_keys (
    name character varying(32) NOT NULL,
    value character varying(64) NOT NULL,
    created_at timestamp with time zone NOT NULL
);


--
-- Name: sessions; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.sessions (
    sequence bigint NOT NULL,
    id character varying(32) NOT NULL,
    secret_hash character varying(64) NOT NULL,
    token_id character varying(32) NOT NULL,
    created_at timestamp with time zone NOT NULL,
    expires_at timestamp with time zone NOT NULL
);


--
-- Name: sessions_sequence_seq; Type: SEQUENCE; Schema: public; Owner: -
--

CREATE SEQUENCE public.sessions_sequence_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: sessions_sequence_seq; Type: SEQUENCE OWNED BY; Schema: public; Owner: -
--

ALTER SEQUENCE public.sessions_sequence_seq OWNED BY public.sessions.sequence;


--
-- Name: tokens; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.tokens (
    sequence bigint NOT NULL,
    id character varying(32) NOT NULL,
    name character varying(200) NOT NULL,
    scopes character varying(100) NOT NULL,
    secret_hash character varying(64) NOT NULL,
    key_id character varying(16) NOT NULL,
    created_by character varying(200) NOT NULL,
    created_at timestamp with time zone NOT NULL,
    expires_at timestamp with time zone,
    revoked_at timestamp with time zone,
    last_used_at timestamp with time zone
);


--
-- Name: tokens_sequence_seq; Type: SEQUENCE; Schema: public; Owner: -
--

CREATE SEQUENCE public.tokens_sequence_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: tokens_sequence_seq; Type: SEQUENCE OWNED BY; Schema: public; Owner: -
--

ALTER SEQUENCE public.tokens_sequence_seq OWNED BY public.tokens.sequence;


--
-- Name: agents sequence; Type: DEFAULT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.agents ALTER COLUMN sequence SET DEFAULT nextval('public.agents_sequence_seq'::regclass);


--
-- Name: alias_moves sequence; Type: DEFAULT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.alias_moves ALTER COLUMN sequence SET DEFAULT nextval('public.alias_moves_sequence_seq'::regclass);


--
-- Name: aliases sequence; Type: DEFAULT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.aliases ALTER COLUMN sequence SET DEFAULT nextval('public.aliases_sequence_seq'::regclass);


--
-- Name: clusters sequence; Type: DEFAULT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.clusters ALTER COLUMN sequence SET DEFAULT nextval('public.clusters_sequence_seq'::regclass);


--
-- Name: events sequence; Type: DEFAULT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.events ALTER COLUMN sequence SET DEFAULT nextval('public.events_sequence_seq'::regclass);


--
-- Name: idempotency_keys sequence; Type: DEFAULT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.idempotency_keys ALTER COLUMN sequence SET DEFAULT nextval('public.idempotency_keys_sequence_seq'::regclass);


--
-- Name: jobs sequence; Type: DEFAULT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.jobs ALTER COLUMN sequence SET DEFAULT nextval('public.jobs_sequence_seq'::regclass);


--
-- Name: members sequence; Type: DEFAULT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.members ALTER COLUMN sequence SET DEFAULT nextval('public.members_sequence_seq'::regclass);


--
-- Name: plans sequence; Type: DEFAULT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.plans ALTER COLUMN sequence SET DEFAULT nextval('public.plans_sequence_seq'::regclass);


--
-- Name: profiles sequence; Type: DEFAULT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.profiles ALTER COLUMN sequence SET DEFAULT nextval('public.profiles_sequence_seq'::regclass);


--
-- Name: reports sequence; Type: DEFAULT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.reports ALTER COLUMN sequence SET DEFAULT nextval('public.reports_sequence_seq'::regclass);


--
-- Name: runs sequence; Type: DEFAULT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.runs ALTER COLUMN sequence SET DEFAULT nextval('public.runs_sequence_seq'::regclass);


--
-- Name: sessions sequence; Type: DEFAULT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.sessions ALTER COLUMN sequence SET DEFAULT nextval('public.sessions_sequence_seq'::regclass);


--
-- Name: tokens sequence; Type: DEFAULT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.tokens ALTER COLUMN sequence SET DEFAULT nextval('public.tokens_sequence_seq'::regclass);


--
-- Data for Name: agents; Type: TABLE DATA; Schema: public; Owner: -
--



--
-- Data for Name: alembic_version; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.alembic_version VALUES ('0003');


--
-- Data for Name: alias_moves; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.alias_moves VALUES (1, 'production', 'bfcda9ae6f8a912816db39f16cba5117', 'local', '2026-11-22 11:08:33.826523+00');


--
-- Data for Name: aliases; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.aliases VALUES (1, 'production', 'bfcda9ae6f8a912816db39f16cba5117', 1, 'local', '2026-11-22 11:08:33.826523+00', '2026-11-22 11:08:33.826523+00');


--
-- Data for Name: clusters; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.clusters VALUES (1, 'be000e8e7afad3f9c3e07abd6c16d41b', '{"device":{"allocator_reserve":0.0,"context_bytes":0,"memory_bytes":42949672960,"name":"A100-40GB"},"groups":[],"levels":[{"bandwidth_bytes_per_s":300000000000.0,"latency_s":5e-06,"size":2}]}', 'A100-40GB', 2, '2026-11-22 11:08:33.264419+00');


--
-- Data for Name: events; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.events VALUES (1, 'bc789ca275867578055e8eb71568fd65', NULL, 1, 'queued', '{"attempts":0,"run_id":"231ac33fd42b508e124f49a172c5c330","state":"queued"}', '2026-11-22 11:08:33.84017+00');
INSERT INTO public.events VALUES (2, NULL, '231ac33fd42b508e124f49a172c5c330', 1, 'queued', '{"attempts":0,"run_id":"231ac33fd42b508e124f49a172c5c330","state":"queued"}', '2026-11-22 11:08:33.84017+00');
INSERT INTO public.events VALUES (3, 'bc789ca275867578055e8eb71568fd65', NULL, 2, 'leased', '{"agent":"node-1","attempts":1,"run_id":"231ac33fd42b508e124f49a172c5c330","state":"leased"}', '2026-11-22 11:08:33.861111+00');
INSERT INTO public.events VALUES (4, NULL, '231ac33fd42b508e124f49a172c5c330', 2, 'leased', '{"agent":"node-1","attempts":1,"run_id":"231ac33fd42b508e124f49a172c5c330","state":"leased"}', '2026-11-22 11:08:33.861111+00');
INSERT INTO public.events VALUES (5, 'bc789ca275867578055e8eb71568fd65', NULL, 3, 'succeeded', '{"agent":"node-1","attempts":1,"run_id":"231ac33fd42b508e124f49a172c5c330","state":"succeeded"}', '2026-11-22 11:08:33.884378+00');
INSERT INTO public.events VALUES (6, NULL, '231ac33fd42b508e124f49a172c5c330', 3, 'succeeded', '{"agent":"node-1","attempts":1,"run_id":"231ac33fd42b508e124f49a172c5c330","state":"succeeded"}', '2026-11-22 11:08:33.884378+00');


--
-- Data for Name: idempotency_keys; Type: TABLE DATA; Schema: public; Owner: -
--



--
-- Data for Name: jobs; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.jobs VALUES (1, 'bc789ca275867578055e8eb71568fd65', 'run', '{"kind":"run","plan_id":"bfcda9ae6f8a912816db39f16cba5117","model":"hf:gpt2?n_layer=4","data":"worker_agent.models.text:random_tokens?vocab_size=50257","loss":null,"steps":4,"seed":0,"learning_rate":0.1,"checkpoint_every":0,"nodes":1,"agents":[]}', 'succeeded', 1, 'node-1', 'bj8ghbFrMg0LLlf6HXk-W3n53rZ5b5CE', NULL, NULL, NULL, NULL, NULL, '231ac33fd42b508e124f49a172c5c330', 'bc99ab773918ec2cd126f5068ce59ac6', NULL, '2026-11-22 11:08:33.84017+00', '2026-11-22 11:08:33.884378+00', NULL, NULL, 1, 'd3d20d47e070d719704d17e599a0a50f', '{"agents":[],"factories":["hf:gpt2","worker_agent.models.text:random_tokens"],"nodes":1,"processes":2,"shared_folder":false}', NULL, NULL, NULL, 'local');


--
-- Data for Name: members; Type: TABLE DATA; Schema: public; Owner: -
--



--
-- Data for Name: plans; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.plans VALUES (1, 'bfcda9ae6f8a912816db39f16cba5117', '{"alternatives":[{"depth":2,"memory_bytes":97517568,"microbatch_size":1,"microbatches":16,"reason":"slower: 41.65 samples/s","recompute":false,"schedule":"pipedream-2bw","throughput_samples_per_s":41.654533904293515,"width":1},{"depth":1,"memory_bytes":117440512,"microbatch_size":1,"microbatches":16,"reason":"slower: 20.83 samples/s","recompute":false,"schedule":"data-parallel","throughput_samples_per_s":20.833333333333314,"width":1}],"batch_size":16,"bubble_fraction":0.0,"calibration_id":null,"certificate":{"bound":0.02400000000000002,"claim":"Of 10 configurations (schedule, width, depth, microbatch size, with recomputation or without), the batch rules out 0; 0 hold more than a device has, and 8 train slower, by bounds on all their splits; of the other 2 the best split was found, or shown to be slower.","method":"branch and bound","quantity":"seconds a sample","value":0.02400000000000002,"witness":[10.0,0.0,0.0,8.0,2.0]},"chunks":1,"cluster_id":"be000e8e7afad3f9c3e07abd6c16d41b","configurations_considered":10,"cost_model":"pipedream-2bw-a.1","costs":[{"activation_bytes":16777216,"activation_port_devices":0,"activation_transfer_s":0.0,"backward_input_s":0.032,"backward_s":0.032,"backward_weight_s":0.0,"fixed_bytes":50331648,"forward_s":0.016,"gradient_bytes":50331648,"gradient_port_devices":0,"gradient_transfer_s":0.0,"input_bytes":1048576,"instruction_s":0.0,"latency_s":0.0,"microbatch_size":1,"recompute_s":0.016,"reduce_port_devices":1,"reduce_s":0.00017277216,"reduce_tail_s":0.00013082911999999698,"update_s":0.0,"version_bytes":50331648,"weight_gradient_bytes":null}],"depth":1,"dtype":"float32","estimated":false,"feasible":true,"id":"bfcda9ae6f8a912816db39f16cba5117","interpolated":false,"master_weights":false,"memory_accounting":"training","microbatch_size":1,"microbatches":8,"model":{"name":"gpt2-small-4","spec":"hf:gpt2?n_layer=4&n_embd=256"},"optimal_in_flight":1,"optimizer":"sgd","order":null,"pareto":[],"placement":[{"replica":0,"stage":0},{"replica":1,"stage":0}],"planner":"pipedream-2bw","profile_id":"7d983ca0335f6fe3b91fb77f0ef052ec","schedule":"data-parallel","simulated":{"batches":4,"bubble_fraction":0.000340584795809451,"busy_fraction":[0.9996594152041905,0.9996594152041905],"extrapolated_from":null,"peak_memory_bytes":[117440512,117440512],"throughput_samples_per_s":41.652475633507905},"split_backward":false,"split_backward_half_way":false,"stages":[{"device":null,"memory":{"activations":16777216,"buffers":0,"gradients":50331648,"master_weights":0,"optimizer_states":0,"transient":0,"weights":50331648},"memory_bytes":117440512,"recompute":false,"replicas":2,"start":0,"stop":4,"time_s":0.04800000000000004}],"throughput_samples_per_s":41.66666666666663,"time_per_microbatch_s":0.04800000000000004,"width":2}', '{"profile_id":"7d983ca0335f6fe3b91fb77f0ef052ec","cluster_id":"be000e8e7afad3f9c3e07abd6c16d41b","planner":"pipedream-2bw","batch_size":16,"options":{"microbatch_size":null,"schedule":null,"stages":null,"recompute":null,"synchronisation":null,"memory":"training","optimizer":"sgd","recompute_factor":null,"safe_batch":false,"master_weights":null,"semantics":null,"compression_ratio":null,"straight":false,"fewer_machines":false,"cuts":null,"forced_cuts":[],"forbidden_cuts":[],"split_backward":null,"split_backward_half_way":false,"time_limit_s":null,"as_if":false},"other_profile_ids":[],"calibration":null}', 0.006309853997663595, 'pipedream-2bw', 'gpt2-small-4', '7d983ca0335f6fe3b91fb77f0ef052ec', 'be000e8e7afad3f9c3e07abd6c16d41b', 'data-parallel', 1, 2, 2, 16, 1, 8, 41.66666666666663, 0, '2026-11-22 11:08:33.787092+00', false, 117440512, 'A100-40GB', 2, 'local');
INSERT INTO public.plans VALUES (2, '0791d36c05d09d48d90db106ff189252', '{"alternatives":[{"depth":2,"memory_bytes":106954752,"microbatch_size":2,"microbatches":8,"reason":"slower: 27.77 samples/s","recompute":true,"schedule":"gpipe","throughput_samples_per_s":27.771710954947277,"width":1}],"batch_size":16,"bubble_fraction":0.058823529411764705,"calibration_id":null,"certificate":null,"chunks":1,"cluster_id":"be000e8e7afad3f9c3e07abd6c16d41b","configurations_considered":2,"cost_model":"gpipe-2019-2.3","costs":[{"activation_bytes":8388608,"activation_port_devices":1,"activation_transfer_s":3.495253333333333e-06,"backward_input_s":0.016,"backward_s":0.016,"backward_weight_s":0.0,"fixed_bytes":25165824,"forward_s":0.008,"gradient_bytes":25165824,"gradient_port_devices":0,"gradient_transfer_s":0.0,"input_bytes":1048576,"instruction_s":0.0,"latency_s":5e-06,"microbatch_size":1,"recompute_s":0.008,"reduce_port_devices":1,"reduce_s":0.0,"reduce_tail_s":0.0,"update_s":0.0,"version_bytes":25165824,"weight_gradient_bytes":null},{"activation_bytes":8388608,"activation_port_devices":0,"activation_transfer_s":0.0,"backward_input_s":0.016,"backward_s":0.016,"backward_weight_s":0.0,"fixed_bytes":25165824,"forward_s":0.008,"gradient_bytes":25165824,"gradient_port_devices":1,"gradient_transfer_s":3.495253333333333e-06,"input_bytes":1048576,"instruction_s":0.0,"latency_s":5e-06,"microbatch_size":1,"recompute_s":0.008,"reduce_port_devices":1,"reduce_s":0.0,"reduce_tail_s":0.0,"update_s":0.0,"version_bytes":25165824,"weight_gradient_bytes":null}],"depth":2,"dtype":"float32","estimated":false,"feasible":true,"id":"0791d36c05d09d48d90db106ff189252","interpolated":false,"master_weights":false,"memory_accounting":"training","microbatch_size":1,"microbatches":16,"model":{"name":"gpt2-small-4","spec":"hf:gpt2?n_layer=4&n_embd=256"},"optimal_in_flight":16,"optimizer":"sgd","order":null,"pareto":[],"placement":[{"replica":0,"stage":0},{"replica":0,"stage":1}],"planner":"gpipe","profile_id":"7d983ca0335f6fe3b91fb77f0ef052ec","schedule":"gpipe","simulated":{"batches":4,"bubble_fraction":0.04480639780460116,"busy_fraction":[0.9551936021953988,0.9551936021953987],"extrapolated_from":null,"peak_memory_bytes":[74448896,74448896],"throughput_samples_per_s":29.849800068606182},"split_backward":false,"split_backward_half_way":false,"stages":[{"device":null,"memory":{"activations":25165824,"buffers":19922944,"gradients":25165824,"master_weights":0,"optimizer_states":0,"transient":0,"weights":25165824},"memory_bytes":95420416,"recompute":true,"replicas":1,"start":0,"stop":2,"time_s":0.032006990506666694},{"device":null,"memory":{"activations":25165824,"buffers":18874368,"gradients":25165824,"master_weights":0,"optimizer_states":0,"transient":0,"weights":25165824},"memory_bytes":94371840,"recompute":true,"replicas":1,"start":2,"stop":4,"time_s":0.032006990506666694}],"throughput_samples_per_s":29.405341011120647,"time_per_microbatch_s":0.03400742741333336,"width":1}', '{"profile_id":"7d983ca0335f6fe3b91fb77f0ef052ec","cluster_id":"be000e8e7afad3f9c3e07abd6c16d41b","planner":"gpipe","batch_size":16,"options":{"microbatch_size":null,"schedule":null,"stages":null,"recompute":null,"synchronisation":null,"memory":"training","optimizer":"sgd","recompute_factor":null,"safe_batch":false,"master_weights":null,"semantics":null,"compression_ratio":null,"straight":false,"fewer_machines":false,"cuts":null,"forced_cuts":[],"forbidden_cuts":[],"split_backward":null,"split_backward_half_way":false,"time_limit_s":null,"as_if":false},"other_profile_ids":[],"calibration":null}', 0.004787837999174371, 'gpipe', 'gpt2-small-4', '7d983ca0335f6fe3b91fb77f0ef052ec', 'be000e8e7afad3f9c3e07abd6c16d41b', 'gpipe', 2, 1, 2, 16, 1, 16, 29.405341011120647, 0.058823529411764705, '2026-11-22 11:08:33.816313+00', false, 95420416, 'A100-40GB', 2, 'local');


--
-- Data for Name: profiles; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.profiles VALUES (1, '7d983ca0335f6fe3b91fb77f0ef052ec', '{"blocks":[{"measurements":[{"activation_bytes":4194304,"backward_input_s":null,"backward_s":0.008,"backward_spread_s":null,"backward_weight_s":null,"forward_s":0.004,"forward_spread_s":null,"input_bytes":1048576,"microbatch_size":1,"output_bytes":1048576,"weight_gradient_bytes":null,"workspace_bytes":0},{"activation_bytes":8388608,"backward_input_s":null,"backward_s":0.016,"backward_spread_s":null,"backward_weight_s":null,"forward_s":0.008,"forward_spread_s":null,"input_bytes":2097152,"microbatch_size":2,"output_bytes":2097152,"weight_gradient_bytes":null,"workspace_bytes":0}],"name":"block0","weight_bytes":12582912},{"measurements":[{"activation_bytes":4194304,"backward_input_s":null,"backward_s":0.008,"backward_spread_s":null,"backward_weight_s":null,"forward_s":0.004,"forward_spread_s":null,"input_bytes":1048576,"microbatch_size":1,"output_bytes":1048576,"weight_gradient_bytes":null,"workspace_bytes":0},{"activation_bytes":8388608,"backward_input_s":null,"backward_s":0.016,"backward_spread_s":null,"backward_weight_s":null,"forward_s":0.008,"forward_spread_s":null,"input_bytes":2097152,"microbatch_size":2,"output_bytes":2097152,"weight_gradient_bytes":null,"workspace_bytes":0}],"name":"block1","weight_bytes":12582912},{"measurements":[{"activation_bytes":4194304,"backward_input_s":null,"backward_s":0.008,"backward_spread_s":null,"backward_weight_s":null,"forward_s":0.004,"forward_spread_s":null,"input_bytes":1048576,"microbatch_size":1,"output_bytes":1048576,"weight_gradient_bytes":null,"workspace_bytes":0},{"activation_bytes":8388608,"backward_input_s":null,"backward_s":0.016,"backward_spread_s":null,"backward_weight_s":null,"forward_s":0.008,"forward_spread_s":null,"input_bytes":2097152,"microbatch_size":2,"output_bytes":2097152,"weight_gradient_bytes":null,"workspace_bytes":0}],"name":"block2","weight_bytes":12582912},{"measurements":[{"activation_bytes":4194304,"backward_input_s":null,"backward_s":0.008,"backward_spread_s":null,"backward_weight_s":null,"forward_s":0.004,"forward_spread_s":null,"input_bytes":1048576,"microbatch_size":1,"output_bytes":1048576,"weight_gradient_bytes":null,"workspace_bytes":0},{"activation_bytes":8388608,"backward_input_s":null,"backward_s":0.016,"backward_spread_s":null,"backward_weight_s":null,"forward_s":0.008,"forward_spread_s":null,"input_bytes":2097152,"microbatch_size":2,"output_bytes":2097152,"weight_gradient_bytes":null,"workspace_bytes":0}],"name":"block3","weight_bytes":12582912}],"device":{"allocator_reserve":0.0,"context_bytes":0,"memory_bytes":42949672960,"name":"A100-40GB"},"dtype":"float32","edges":null,"estimated":false,"method":null,"model":{"name":"gpt2-small-4","spec":"hf:gpt2?n_layer=4&n_embd=256"},"overheads":{"backward_after_forward":1.0,"exchange_factor":1.0,"forward_without_graph":1.0,"instruction_s":0.0,"recompute":1.0,"update_s_per_byte":0.0,"version_s_per_byte":0.0}}', 'gpt2-small-4', 'A100-40GB', 'float32', 4, '2026-11-22 11:08:33.25457+00', false);


--
-- Data for Name: reports; Type: TABLE DATA; Schema: public; Owner: -
--



--
-- Data for Name: run_chunks; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.run_chunks VALUES ('231ac33fd42b508e124f49a172c5c330', 0, 0, 76, 0, 1920654146, '\x0108370000001e000000200000000f00000031000000590000005c000000210000005b22422564222c2022422564402564222c2022462564222c2022462564402564222c2022472564222c2022532564222c2022552564225d789c63616041865c0c1c3c6c4c28908b8958218651300ad00000fb740159789c636281002516ec80890102306872f521018651300a46014d010006f7015d789c63601805a38076000002600001789c6360a00c2c58b460118cbd8500882200fe0201ccac2304401201c0020430b3580800260280c2201ad1000019944dc9789c63600001262616062610c9c2c2c6c2d2d2d4d4d402046d40d00102dbb76fbf0d0437a1e03a103c03811750f00a0c36336080e7cf3fa3839f3f7fd610063f31cdba7d3b171d9899994913066698668d027a010044ca5eea789c63600002262616062610c9c2c2c6c2d2d2d4d4d402046d40d00102dbb76fbf0d0437a1e03a103c03811750f00a0c366f664007cf9f7f46073f7ffeac210c7efec430ebf6ed5c74606666264d1898996198350ae80600257d60cc789c6360a00cfc47a307a3593c04d43211906784aa61a4d45123100000f17e060d');
INSERT INTO public.run_chunks VALUES ('231ac33fd42b508e124f49a172c5c330', 1, 0, 76, 0, 1920654146, '\x0108370000001e000000220000000f00000031000000590000005c000000210000005b22422564222c2022422564402564222c2022462564222c2022462564402564222c2022472564222c2022532564222c2022552564225d789c63616041865c0c1c3c6c4c28908b8958218651300ad00000fb740159789c636181001516ec80890102d0691632f53121018651300a46014d010024f70165789c63601805a38076000002600001789c6360a00c2c58b460118cbd8500882200fe0201ccac2304401201c0020430b3580800260280c2201ad1000019944dc9789c63600001262616062610c9c2c2c6c2d2d2d4d4d402046d40d00102dbb76fbf0d0437a1e03a103c03811750f00a0c36336080e7cf3fa3839f3f7fd610063f31cdba7d3b171d9899994913066698668d027a010044ca5eea789c63600002262616062610c9c2c2c6c2d2d2d4d4d402046d40d00102dbb76fbf0d0437a1e03a103c03811750f00a0c366f664007cf9f7f46073f7ffeac210c7efec430ebf6ed5c74606666264d1898996198350ae80600257d60cc789c6360a00cfc47a307a3593c04d43211906784aa61a4d45123100000f17e060d');
INSERT INTO public.run_chunks VALUES ('231ac33fd42b508e124f49a172c5c330', -1, 0, 4, 0, 3, '\x010118000000789c63603099c5c0603c131d2b48080b3600010063d40727');


--
-- Data for Name: runs; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.runs VALUES (1, '231ac33fd42b508e124f49a172c5c330', 'bc789ca275867578055e8eb71568fd65', 'bfcda9ae6f8a912816db39f16cba5117', '{"batch_size":16,"bubble_fraction":{"measured":0.12,"predicted":0.1},"elapsed_s":1.9206541456000013,"first_step":0,"losses":[],"ranks":[{"device_memory":null,"peak_memory_bytes":117440512,"peak_resident_bytes":1073741824,"rank":0,"replica":0,"stage":0},{"device_memory":null,"peak_memory_bytes":117440512,"peak_resident_bytes":1073741824,"rank":1,"replica":1,"stage":0}],"schedule":"data-parallel","stages":[{"busy_s_per_batch":{"measured":0.4800000000000003,"predicted":0.3840000000000003},"peak_memory_bytes":{"measured":117440512.0,"predicted":117440512.0},"stage":0}],"steps":4,"throughput_samples_per_s":{"measured":48.0,"predicted":60.0}}', 60, 48, '2026-11-22 11:08:33.84017+00', '{"batch_size": 16, "batches": 4, "lanes": [{"rank": 0, "stage": 0, "replica": 0}, {"rank": 1, "stage": 0, "replica": 1}]}');


--
-- Data for Name: server_keys; Type: TABLE DATA; Schema: public; Owner: -
--



--
-- Data for Name: sessions; Type: TABLE DATA; Schema: public; Owner: -
--



--
-- Data for Name: tokens; Type: TABLE DATA; Schema: public; Owner: -
--



--
-- Name: agents_sequence_seq; Type: SEQUENCE SET; Schema: public; Owner: -
--

SELECT pg_catalog.setval('public.agents_sequence_seq', 1, false);


--
-- Name: alias_moves_sequence_seq; Type: SEQUENCE SET; Schema: public; Owner: -
--

SELECT pg_catalog.setval('public.alias_moves_sequence_seq', 1, true);


--
-- Name: aliases_sequence_seq; Type: SEQUENCE SET; Schema: public; Owner: -
--

SELECT pg_catalog.setval('public.aliases_sequence_seq', 1, true);


--
-- Name: clusters_sequence_seq; Type: SEQUENCE SET; Schema: public; Owner: -
--

SELECT pg_catalog.setval('public.clusters_sequence_seq', 1, true);


--
-- Name: events_sequence_seq; Type: SEQUENCE SET; Schema: public; Owner: -
--

SELECT pg_catalog.setval('public.events_sequence_seq', 6, true);


--
-- Name: idempotency_keys_sequence_seq; Type: SEQUENCE SET; Schema: public; Owner: -
--

SELECT pg_catalog.setval('public.idempotency_keys_sequence_seq', 1, false);


--
-- Name: jobs_sequence_seq; Type: SEQUENCE SET; Schema: public; Owner: -
--

SELECT pg_catalog.setval('public.jobs_sequence_seq', 1, true);


--
-- Name: members_sequence_seq; Type: SEQUENCE SET; Schema: public; Owner: -
--

SELECT pg_catalog.setval('public.members_sequence_seq', 1, false);


--
-- Name: plans_sequence_seq; Type: SEQUENCE SET; Schema: public; Owner: -
--

SELECT pg_catalog.setval('public.plans_sequence_seq', 2, true);


--
-- Name: profiles_sequence_seq; Type: SEQUENCE SET; Schema: public; Owner: -
--

SELECT pg_catalog.setval('public.profiles_sequence_seq', 1, true);


--
-- Name: reports_sequence_seq; Type: SEQUENCE SET; Schema: public; Owner: -
--

SELECT pg_catalog.setval('public.reports_sequence_seq', 1, false);


--
-- Name: runs_sequence_seq; Type: SEQUENCE SET; Schema: public; Owner: -
--

SELECT pg_catalog.setval('public.runs_sequence_seq', 1, true);


--
-- Name: sessions_sequence_seq; Type: SEQUENCE SET; Schema: public; Owner: -
--

SELECT pg_catalog.setval('public.sessions_sequence_seq', 1, false);


--
-- Name: tokens_sequence_seq; Type: SEQUENCE SET; Schema: public; Owner: -
--

SELECT pg_catalog.setval('public.tokens_sequence_seq', 1, false);


--
-- Name: alembic_version alembic_version_pkc; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.alembic_version
    ADD CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num);


--
-- Name: agents pk_agents; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.agents
    ADD CONSTRAINT pk_agents PRIMARY KEY (sequence);


--
-- Name: alias_moves pk_alias_moves; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.alias_moves
    ADD CONSTRAINT pk_alias_moves PRIMARY KEY (sequence);


--
-- Name: aliases pk_aliases; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.aliases
    ADD CONSTRAINT pk_aliases PRIMARY KEY (sequence);


--
-- Name: clusters pk_clusters; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.clusters
    ADD CONSTRAINT pk_clusters PRIMARY KEY (sequence);


--
-- Name: events pk_events; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.events
    ADD CONSTRAINT pk_events PRIMARY KEY (sequence);


--
-- Name: idempotency_keys pk_idempotency_keys; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.idempotency_keys
    ADD CONSTRAINT pk_idempotency_keys PRIMARY KEY (sequence);


--
-- Name: jobs pk_jobs; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.jobs
    ADD CONSTRAINT pk_jobs PRIMARY KEY (sequence);


--
-- Name: members pk_members; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.members
    ADD CONSTRAINT pk_members PRIMARY KEY (sequence);


--
-- Name: plans pk_plans; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.plans
    ADD CONSTRAINT pk_plans PRIMARY KEY (sequence);


--
-- Name: profiles pk_profiles; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.profiles
    ADD CONSTRAINT pk_profiles PRIMARY KEY (sequence);


--
-- Name: reports pk_reports; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.reports
    ADD CONSTRAINT pk_reports PRIMARY KEY (sequence);


--
-- Name: run_chunks pk_run_chunks; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.run_chunks
    ADD CONSTRAINT pk_run_chunks PRIMARY KEY (run_id, series, part);


--
-- Name: runs pk_runs; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.runs
    ADD CONSTRAINT pk_runs PRIMARY KEY (sequence);


--
-- Name: server_keys pk_server_keys; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.server_keys
    ADD CONSTRAINT pk_server_keys PRIMARY KEY (name);


--
-- Name: sessions pk_sessions; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.sessions
    ADD CONSTRAINT pk_sessions PRIMARY KEY (sequence);


--
-- Name: tokens pk_tokens; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.tokens
    ADD CONSTRAINT pk_tokens PRIMARY KEY (sequence);


--
-- Name: agents uq_agents_id; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.agents
    ADD CONSTRAINT uq_agents_id UNIQUE (id);


--
-- Name: agents uq_agents_name; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.agents
    ADD CONSTRAINT uq_agents_name UNIQUE (name);


--
-- Name: aliases uq_aliases_name; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.aliases
    ADD CONSTRAINT uq_aliases_name UNIQUE (name);


--
-- Name: clusters uq_clusters_id; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.clusters
    ADD CONSTRAINT uq_clusters_id UNIQUE (id);


--
-- Name: events uq_events_job_id_number; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.events
    ADD CONSTRAINT uq_events_job_id_number UNIQUE (job_id, number);


--
-- Name: events uq_events_run_id_number; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.events
    ADD CONSTRAINT uq_events_run_id_number UNIQUE (run_id, number);


--
-- Name: idempotency_keys uq_idempotency_keys_caller_key; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.idempotency_keys
    ADD CONSTRAINT uq_idempotency_keys_caller_key UNIQUE (caller, key);


--
-- Name: jobs uq_jobs_id; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.jobs
    ADD CONSTRAINT uq_jobs_id UNIQUE (id);


--
-- Name: jobs uq_jobs_idempotency_key; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.jobs
    ADD CONSTRAINT uq_jobs_idempotency_key UNIQUE (idempotency_key);


--
-- Name: members uq_members_job_id_node_rank; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.members
    ADD CONSTRAINT uq_members_job_id_node_rank UNIQUE (job_id, node_rank);


--
-- Name: plans uq_plans_id; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.plans
    ADD CONSTRAINT uq_plans_id UNIQUE (id);


--
-- Name: profiles uq_profiles_id; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.profiles
    ADD CONSTRAINT uq_profiles_id UNIQUE (id);


--
-- Name: reports uq_reports_id; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.reports
    ADD CONSTRAINT uq_reports_id UNIQUE (id);


--
-- Name: runs uq_runs_id; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.runs
    ADD CONSTRAINT uq_runs_id UNIQUE (id);


--
-- Name: runs uq_runs_job_id; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.runs
    ADD CONSTRAINT uq_runs_job_id UNIQUE (job_id);


--
-- Name: sessions uq_sessions_id; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.sessions
    ADD CONSTRAINT uq_sessions_id UNIQUE (id);


--
-- Name: tokens uq_tokens_id; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.tokens
    ADD CONSTRAINT uq_tokens_id UNIQUE (id);


--
-- Name: ix_agents_last_seen_at_sequence; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_agents_last_seen_at_sequence ON public.agents USING btree (last_seen_at, sequence);


--
-- Name: ix_alias_moves_name_sequence; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_alias_moves_name_sequence ON public.alias_moves USING btree (name, sequence);


--
-- Name: ix_aliases_plan_id; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_aliases_plan_id ON public.aliases USING btree (plan_id);


--
-- Name: ix_clusters_created_at_sequence; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_clusters_created_at_sequence ON public.clusters USING btree (created_at, sequence);


--
-- Name: ix_clusters_device_name_created_at_sequence; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_clusters_device_name_created_at_sequence ON public.clusters USING btree (device_name, created_at, sequence);


--
-- Name: ix_clusters_devices_sequence; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_clusters_devices_sequence ON public.clusters USING btree (devices, sequence);


--
-- Name: ix_idempotency_keys_expires_at; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_idempotency_keys_expires_at ON public.idempotency_keys USING btree (expires_at);


--
-- Name: ix_jobs_state_lease_expires_at; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_jobs_state_lease_expires_at ON public.jobs USING btree (state, lease_expires_at);


--
-- Name: ix_jobs_state_needs_id_sequence; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_jobs_state_needs_id_sequence ON public.jobs USING btree (state, needs_id, sequence);


--
-- Name: ix_jobs_state_sequence; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_jobs_state_sequence ON public.jobs USING btree (state, sequence);


--
-- Name: ix_members_agent; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_members_agent ON public.members USING btree (agent);


--
-- Name: ix_plans_cluster_id_created_at_sequence; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_plans_cluster_id_created_at_sequence ON public.plans USING btree (cluster_id, created_at, sequence);


--
-- Name: ix_plans_cluster_id_throughput_samples_per_s_sequence; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_plans_cluster_id_throughput_samples_per_s_sequence ON public.plans USING btree (cluster_id, throughput_samples_per_s, sequence);


--
-- Name: ix_plans_created_at_sequence; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_plans_created_at_sequence ON public.plans USING btree (created_at, sequence);


--
-- Name: ix_plans_memory_bytes_sequence; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_plans_memory_bytes_sequence ON public.plans USING btree (memory_bytes, sequence);


--
-- Name: ix_plans_model_name_created_at_sequence; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_plans_model_name_created_at_sequence ON public.plans USING btree (model_name, created_at, sequence);


--
-- Name: ix_plans_model_name_throughput_samples_per_s_sequence; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_plans_model_name_throughput_samples_per_s_sequence ON public.plans USING btree (model_name, throughput_samples_per_s, sequence);


--
-- Name: ix_plans_planner_created_at_sequence; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_plans_planner_created_at_sequence ON public.plans USING btree (planner, created_at, sequence);


--
-- Name: ix_plans_planner_throughput_samples_per_s_sequence; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_plans_planner_throughput_samples_per_s_sequence ON public.plans USING btree (planner, throughput_samples_per_s, sequence);


--
-- Name: ix_plans_profile_id_created_at_sequence; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_plans_profile_id_created_at_sequence ON public.plans USING btree (profile_id, created_at, sequence);


--
-- Name: ix_plans_profile_id_throughput_samples_per_s_sequence; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_plans_profile_id_throughput_samples_per_s_sequence ON public.plans USING btree (profile_id, throughput_samples_per_s, sequence);


--
-- Name: ix_plans_schedule_created_at_sequence; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_plans_schedule_created_at_sequence ON public.plans USING btree (schedule, created_at, sequence);


--
-- Name: ix_plans_schedule_throughput_samples_per_s_sequence; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_plans_schedule_throughput_samples_per_s_sequence ON public.plans USING btree (schedule, throughput_samples_per_s, sequence);


--
-- Name: ix_plans_throughput_samples_per_s_sequence; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_plans_throughput_samples_per_s_sequence ON public.plans USING btree (throughput_samples_per_s, sequence);


--
-- Name: ix_profiles_blocks_sequence; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_profiles_blocks_sequence ON public.profiles USING btree (blocks, sequence);


--
-- Name: ix_profiles_created_at_sequence; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_profiles_created_at_sequence ON public.profiles USING btree (created_at, sequence);


--
-- Name: ix_profiles_device_name_created_at_sequence; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_profiles_device_name_created_at_sequence ON public.profiles USING btree (device_name, created_at, sequence);


--
-- Name: ix_profiles_model_name_created_at_sequence; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_profiles_model_name_created_at_sequence ON public.profiles USING btree (model_name, created_at, sequence);


--
-- Name: ix_reports_job_id; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_reports_job_id ON public.reports USING btree (job_id);


--
-- Name: ix_runs_plan_id_sequence; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_runs_plan_id_sequence ON public.runs USING btree (plan_id, sequence);


--
-- Name: ix_sessions_expires_at; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_sessions_expires_at ON public.sessions USING btree (expires_at);


--
-- Name: aliases fk_aliases_plan_id_plans; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.aliases
    ADD CONSTRAINT fk_aliases_plan_id_plans FOREIGN KEY (plan_id) REFERENCES public.plans(id);


--
-- Name: events fk_events_job_id_jobs; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.events
    ADD CONSTRAINT fk_events_job_id_jobs FOREIGN KEY (job_id) REFERENCES public.jobs(id) ON DELETE CASCADE;


--
-- Name: events fk_events_run_id_runs; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.events
    ADD CONSTRAINT fk_events_run_id_runs FOREIGN KEY (run_id) REFERENCES public.runs(id) ON DELETE CASCADE;


--
-- Name: jobs fk_jobs_cluster_id_clusters; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.jobs
    ADD CONSTRAINT fk_jobs_cluster_id_clusters FOREIGN KEY (cluster_id) REFERENCES public.clusters(id);


--
-- Name: jobs fk_jobs_profile_id_profiles; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.jobs
    ADD CONSTRAINT fk_jobs_profile_id_profiles FOREIGN KEY (profile_id) REFERENCES public.profiles(id);


--
-- Name: members fk_members_job_id_jobs; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.members
    ADD CONSTRAINT fk_members_job_id_jobs FOREIGN KEY (job_id) REFERENCES public.jobs(id) ON DELETE CASCADE;


--
-- Name: plans fk_plans_cluster_id_clusters; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.plans
    ADD CONSTRAINT fk_plans_cluster_id_clusters FOREIGN KEY (cluster_id) REFERENCES public.clusters(id);


--
-- Name: plans fk_plans_profile_id_profiles; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.plans
    ADD CONSTRAINT fk_plans_profile_id_profiles FOREIGN KEY (profile_id) REFERENCES public.profiles(id);


--
-- Name: reports fk_reports_job_id_jobs; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.reports
    ADD CONSTRAINT fk_reports_job_id_jobs FOREIGN KEY (job_id) REFERENCES public.jobs(id) ON DELETE CASCADE;


--
-- Name: run_chunks fk_run_chunks_run_id_runs; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.run_chunks
    ADD CONSTRAINT fk_run_chunks_run_id_runs FOREIGN KEY (run_id) REFERENCES public.runs(id) ON DELETE CASCADE;


--
-- Name: runs fk_runs_job_id_jobs; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.runs
    ADD CONSTRAINT fk_runs_job_id_jobs FOREIGN KEY (job_id) REFERENCES public.jobs(id);


--
-- Name: runs fk_runs_plan_id_plans; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.runs
    ADD CONSTRAINT fk_runs_plan_id_plans FOREIGN KEY (plan_id) REFERENCES public.plans(id);


--
-- Name: sessions fk_sessions_token_id_tokens; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.sessions
    ADD CONSTRAINT fk_sessions_token_id_tokens FOREIGN KEY (token_id) REFERENCES public.tokens(id);


--
-- PostgreSQL database dump complete
--

\unrestrict nxBVsj798flCcOXLAkqUz3KtyOc3qawXuSeklJePlDZ8TOLurshEwGYbfgkDIFu

