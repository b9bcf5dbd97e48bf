import java.net.InetSocketAddress;
import java.util.HashMap;
import java.util.Map;
import org.apache.hadoop.conf.Configuration;
import org.apache.iceberg.CatalogUtil;
import org.apache.iceberg.rest.RESTCatalogAdapter;
import org.apache.iceberg.rest.RESTCatalogServlet;
import org.eclipse.jetty.server.Server;
import org.eclipse.jetty.servlet.ServletContextHandler;
import org.eclipse.jetty.servlet.ServletHolder;

/** Iceberg's REST catalog on loopback; its own main listens on all interfaces. Arguments: PORT NAME=VALUE... */
public class LoopbackCatalog {
  public static void main(String[] words) throws Exception {
    Map<String, String> settings = new HashMap<>();
    for (int n = 1; n < words.length; n++) {
      String[] pair = words[n].split("=", 2);
      settings.put(pair[0], pair[1]);
    }
    var catalog = CatalogUtil.buildIcebergCatalog("rest", settings, new Configuration());
    var context = new ServletContextHandler();
    context.addServlet(new ServletHolder(new RESTCatalogServlet(new RESTCatalogAdapter(catalog))), "/*");
    var server = new Server(new InetSocketAddress("127.0.0.1", Integer.parseInt(words[0])));
    server.setHandler(context);
    server.start();
    server.join();
  }
}
